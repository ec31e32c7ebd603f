"""Small transfers between host and device that make neither wait; on a CPU both ends are the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, there for whatever is launched after this call.

    The pinned copy may be dropped at once: torch keeps its memory until the transfer has read it.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device, copy=True)


class Lane:
    """Transfers to fixed places on a device, beside what it computes meanwhile; on a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._read: torch.cuda.Event | None = None
        self._staging: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def send(self, array: np.ndarray, into: Tensor) -> None:
        """The array's values into a tensor of its shape, there for whatever is launched after this call.

        What reads the values that were there must have been launched before `done`.
        """
        if self._stream is None:
            into.copy_(torch.from_numpy(array))
            return
        host = self._pinned(array)
        if self._read is None:
            self.done()  # the first values wait for whatever made their place
        with torch.cuda.stream(self._stream):
            self._read.wait()
            into.copy_(host, non_blocking=True)
            self._arrived = self._stream.record_event()
        self._arrived.wait()

    def _pinned(self, array: np.ndarray) -> Tensor:
        """A copy that the device can read while the host goes on, in memory that is kept for it.

        By one thread: torch's own copy wakes many for it, which takes longer than a megabyte.
        """
        if self._arrived is not None:
            self._arrived.synchronize()  # which it has long done
        size, dtype = array.size, torch.from_numpy(array).dtype
        if self._staging is None or self._staging.numel() < size or self._staging.dtype != dtype:
            self._staging = torch.empty(2 * size, dtype=dtype, pin_memory=True)
        host = self._staging[:size].view(array.shape)
        np.copyto(host.numpy(), array)
        return host

    def done(self) -> None:
        """All that reads what was sent has been launched."""
        if self._stream is not None:
            self._read = torch.cuda.current_stream(self._stream.device).record_event()


def upload_parts(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Several [n] int32 arrays in one transfer. Each begins on 16 bytes, else kernels are compiled for both cases."""
    sizes = [len(part) for part in parts]
    room = [-(-size // 4) * 4 for size in sizes]
    packed = np.zeros(sum(room), dtype=np.int32)
    begin = 0
    for part, taken in zip(parts, room, strict=True):
        packed[begin : begin + len(part)] = part
        begin += taken
    sent = upload(packed, device).split(room)
    return [whole[:size] for whole, size in zip(sent, sizes, strict=True)]


class Download:
    """A tensor's values on their way to the host. The tensor may be overwritten by what is launched afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._host = tensor.clone()

    def wait(self) -> Tensor:
        """The values, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    @property
    def arrived(self) -> torch.cuda.Event | None:
        """The moment at which the device had sent them; None on a CPU."""
        return self._event


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The moment at which the device gets to what is launched next; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
