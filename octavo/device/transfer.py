"""`Link`: transfers, streams, events and graphs of a device; null objects on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor


class Event(Protocol):
    """A point in a device's queue of work."""

    def elapsed_time(self, other: Self, /) -> float:
        """Return the milliseconds from this event to the other; both must have passed."""
        ...


class Download(Protocol):
    """A pending copy of a tensor to the host. Work launched later may overwrite the tensor."""

    @property
    def arrived(self) -> Event | None:
        """The event after the transfer; None on the host."""
        ...

    def wait(self) -> Tensor:
        """Wait, and return the values in host memory."""
        ...


class Lane(Protocol):
    """A stream for transfers to fixed addresses, parallel to the compute stream."""

    def send(self, array: np.ndarray, into: Tensor) -> None:
        """Copy the array into a tensor of its shape; all work launched after this call sees it.

        All readers of the previous values must have been launched before `done` was called.
        """
        ...

    def done(self) -> None:
        """Mark that all readers of what was sent have been launched."""
        ...


class Copy(Protocol):
    """A copy between device and host, under way."""

    def done(self) -> bool:
        """Whether it has ended. Does not wait."""
        ...

    def wait(self) -> Tensor:
        """Return what was copied, in the host's memory."""
        ...


class Mark(Protocol):
    """A point in the work of the computing stream."""

    def wait(self, stream: Any = None) -> None:
        """Have a stream's later work wait for it."""
        ...


class Copier(Protocol):
    """A stream for copies between device and host beside what the device computes. Nothing launched later waits for
    them: their memory may be used once `Copy.done` says so.

    Attributes:
        anywhere: `into` may be called in any thread, beside steps. They then end in the order of the calls.
    """

    @property
    def anywhere(self) -> bool: ...

    def room(self, *shape: int) -> Tensor:
        """Return new bytes in the host's memory, uninitialized, from which copies are fast.

        That can take longer than a step: call it at the start, or in a thread of your own.
        """
        ...

    def out(self, read: Callable[[], Tensor]) -> Copy:
        """Copy what `read` returns to the host. It reads after all work that is launched by now."""
        ...

    def mark(self) -> Mark | None:
        """Return a point after all work launched by now, for `into`; None on the host."""
        ...

    def into(self, values: Tensor, write: Callable[[Tensor], None], after: Mark | None) -> Copy:
        """Copy values from the host, and have `write` put them where they belong, after this point."""
        ...


class HostMemory(Protocol):
    """Memory of the host that the device can read while it computes; freed with this object."""

    @property
    def bytes(self) -> Tensor:
        """[size] uint8."""
        ...


class Feed(Protocol):
    """A stream that brings bytes of the host to places on the device before they are read. Graphs record it with the
    work around it."""

    def room(self, size: int) -> HostMemory:
        """Return new memory, uninitialized. May be called from any thread."""
        ...

    def send(self, loads: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        """Copy each first tensor, in memory of `room`, into the second one, after all work launched so far.

        Returns:
            The point after the copies.
        """
        ...


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launch the recorded work again, on the same addresses."""
        ...


class GraphRecorder(Protocol):
    """Records work as graphs that share one memory pool."""

    def start(self) -> None:
        """Return cached memory to the device, so that the pool can take it."""
        ...

    def record(self, launch: Callable[[], None]) -> Graph:
        """Record the work that `launch` launches. It must have run before, so that nothing is compiled now."""
        ...

    def taken(self) -> int:
        """Return the bytes of device memory taken since `start`."""
        ...


class Link(Protocol):
    """Transfers, streams, events and graphs of one device. Nothing blocks unless documented."""

    torch_device: torch.device

    def move(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device: itself if it is there. Fast for large tensors of mapped files."""
        ...

    def upload(self, array: np.ndarray) -> Tensor:
        """Return the array on the device; all work launched after this call sees it."""
        ...

    def download(self, tensor: Tensor) -> Download:
        """Begin to copy a tensor to the host."""
        ...

    def stream(self) -> Lane:
        """Return a new stream for transfers to fixed addresses."""
        ...

    def copier(self) -> Copier:
        """A new stream for copies that no step waits for."""
        ...

    def feed(self) -> Feed:
        """Return a new stream that brings bytes of the host ahead of their use."""
        ...

    def event(self) -> Event | None:
        """Record an event after all work launched so far; None on the host."""
        ...

    def recorder(self) -> GraphRecorder | None:
        """Return a recorder of graphs; None if the device has none."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has completed all launched work."""
        ...


class HostDownload:
    """A completed copy."""

    arrived = None

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.clone()

    def wait(self) -> Tensor:
        return self._values


class HostLane:
    """Copies synchronously."""

    def send(self, array: np.ndarray, into: Tensor) -> None:
        into.copy_(torch.from_numpy(array))

    def done(self) -> None:
        """Do nothing: copies are synchronous."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy that ended when it began."""

    values: Tensor

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self.values


class HostCopier:
    """Copies at once, in the thread whose memory steps use."""

    anywhere = False

    def room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def out(self, read: Callable[[], Tensor]) -> Copy:
        return HostCopy(read())

    def mark(self) -> Mark | None:
        return None

    def into(self, values: Tensor, write: Callable[[Tensor], None], after: Mark | None) -> Copy:
        write(values)
        return HostCopy(values)


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Ordinary memory."""

    bytes: Tensor


class _Passed:
    """A point that is always behind."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""


class HostFeed:
    """Copies at once."""

    def room(self, size: int) -> HostMemory:
        return HostBytes(torch.empty(size, dtype=torch.uint8))

    def send(self, loads: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        for source, target in loads:
            target.copy_(source)
        return _Passed()


class HostLink:
    """Host memory as a device: everything is synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.torch_device, copy=True)

    def download(self, tensor: Tensor) -> Download:
        return HostDownload(tensor)

    def stream(self) -> Lane:
        return HostLane()

    def copier(self) -> Copier:
        return HostCopier()

    def feed(self) -> Feed:
        return HostFeed()

    def event(self) -> Event | None:
        return None

    def recorder(self) -> GraphRecorder | None:
        return None

    def synchronize(self) -> None:
        """Do nothing: launched work is complete."""


@cache
def link_of(device: torch.device) -> Link:
    """Return the link to a torch device."""
    if device.type == "cuda":
        from octavo.device.cuda_transfer import CudaLink

        return CudaLink(device)
    return HostLink(device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """`Link.move`."""
    return link_of(device).move(tensor)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`Link.upload`."""
    return link_of(device).upload(array)


def upload_parts(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Upload several [n] int32 arrays in one transfer. Each starts on a multiple of 16 bytes; otherwise Triton would
    compile kernels for both cases."""
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
