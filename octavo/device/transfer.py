"""`Link`: how the host exchanges data with one kind of device and orders its work; null objects where both are one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Event(Protocol):
    """A moment in a device's queue of work."""

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this moment to the other; both must have passed."""
        ...


class Download(Protocol):
    """A tensor's values on their way to the host. Work launched later may overwrite the tensor."""

    @property
    def arrived(self) -> Event | None:
        """When the device had sent the values; None on the host."""
        ...

    def wait(self) -> Tensor:
        """The values, in the host's memory."""
        ...


class Lane(Protocol):
    """A stream for transfers to fixed addresses, beside what the device computes."""

    def send(self, array: np.ndarray, into: Tensor) -> None:
        """Copy the array into a tensor of its shape; all work launched after this call sees it.

        All readers of the previous values must have been launched before `done` was called.
        """
        ...

    def done(self) -> None:
        """All readers of what was sent have been launched."""
        ...


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launch it again, on the same addresses."""
        ...


class Recorder(Protocol):
    """Records work as graphs that share one pool of memory."""

    def start(self) -> None:
        """Return cached memory to the device, for the pool to take."""
        ...

    def record(self, launch: Callable[[], None]) -> Graph:
        """Record what `launch` launches. The same work must have run before, so that nothing is compiled now."""
        ...

    def taken(self) -> int:
        """Bytes of device memory taken since `start`."""
        ...


class Link(Protocol):
    """Transfers, streams, events and graphs of one device. Nothing here makes host or device wait unless it says so."""

    torch_device: torch.device

    def upload(self, array: np.ndarray) -> Tensor:
        """The array on the device; all work launched after this call sees it."""
        ...

    def download(self, tensor: Tensor) -> Download:
        """Begin to copy a tensor to the host."""
        ...

    def stream(self) -> Lane:
        """A new stream for transfers to fixed addresses."""
        ...

    def event(self) -> Event | None:
        """When the device gets to what is launched next; None on the host, where that is now."""
        ...

    def recorder(self) -> Recorder | None:
        """What records graphs; None if the device has none."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        ...


class HostDownload:
    """A copy."""

    arrived = None

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.clone()

    def wait(self) -> Tensor:
        return self._values


class HostLane:
    """Copies at once."""

    def send(self, array: np.ndarray, into: Tensor) -> None:
        into.copy_(torch.from_numpy(array))

    def done(self) -> None:
        """Copies at once leave nothing to wait for."""


class HostLink:
    """The host's own memory as a device: everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.torch_device, copy=True)

    def download(self, tensor: Tensor) -> Download:
        return HostDownload(tensor)

    def stream(self) -> Lane:
        return HostLane()

    def event(self) -> Event | None:
        return None

    def recorder(self) -> Recorder | None:
        return None

    def synchronize(self) -> None:
        """Work is done when it is launched."""


@cache
def link_of(device: torch.device) -> Link:
    """The link to a device that is known only by torch's name for it."""
    if device.type == "cuda":
        from octavo.device.cuda_transfer import CudaLink

        return CudaLink(device)
    return HostLink(device)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`Link.upload`."""
    return link_of(device).upload(array)


def upload_parts(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Several [n] int32 arrays in one transfer. Each starts on a multiple of 16 bytes; otherwise kernels would be
    compiled for both cases."""
    sizes = [len(part) for part in parts]
    room = [-(-size // 4) * 4 for size in sizes]
    packed = np.zeros(sum(room), dtype=np.int32)
    begin = 0
    for part, taken in zip(parts, room, strict=True):
        packed[begin : begin + len(part)] = part
        begin += taken
    sent = upload(packed, device).split(room)
    return [whole[:size] for whole, size in zip(sent, sizes, strict=True)]


def download(tensor: Tensor) -> Download:
    """`Link.download`."""
    return link_of(tensor.device).download(tensor)
