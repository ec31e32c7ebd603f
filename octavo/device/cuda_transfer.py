"""`CudaLink`: transfers, streams, events and graphs of an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.cuda import check_error, cudart

from octavo.device.cuda_staging import LEAST, Staging
from octavo.device.transfer import (
    Copier,
    Copy,
    Download,
    Event,
    Feed,
    Graph,
    GraphRecorder,
    HostMemory,
    Lane,
    Mark,
)


class CudaDownload:
    """A copy to pinned memory, and the event that follows it."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._values.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def arrived(self) -> Event:
        return self._event

    def wait(self) -> Tensor:
        self._event.synchronize()
        return self._values


class CudaLane:
    """A separate stream, ordered with the compute stream by events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._read: torch.cuda.Event | None = None
        self._staging: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def send(self, array: np.ndarray, into: Tensor) -> None:
        host = self._pinned(array)
        if self._read is None:
            self.done()  # the first transfer waits for the work that allocated its target
        assert self._read is not None
        with torch.cuda.stream(self._stream):
            self._read.wait()
            into.copy_(host, non_blocking=True)
            self._arrived = self._stream.record_event()
        self._arrived.wait()

    def _pinned(self, array: np.ndarray) -> Tensor:
        """Return a copy in a persistent pinned buffer, so that the host does not wait for the transfer.

        Copied by numpy in one thread: waking torch's threads takes longer than copying a megabyte.
        """
        if self._arrived is not None:
            self._arrived.synchronize()  # normally passed long ago
        size, dtype = array.size, torch.from_numpy(array).dtype
        if self._staging is None or self._staging.numel() < size or self._staging.dtype != dtype:
            self._staging = torch.empty(2 * size, dtype=dtype, pin_memory=True)
        host = self._staging[:size].view(array.shape)
        np.copyto(host.numpy(), array)
        return host

    def done(self) -> None:
        self._read = torch.cuda.current_stream(self._stream.device).record_event()


class CudaCopy:
    """Work on a stream, and the event that follows it."""

    def __init__(self, values: Tensor, stream: torch.cuda.Stream) -> None:
        """
        Args:
            values: in pinned memory; kept until the stream has copied them.
        """
        self._values = values
        self._event = stream.record_event()

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> Tensor:
        self._event.synchronize()
        return self._values


class CudaCopier:
    """A stream of its own, which waits for the computing stream, but is not waited for.

    Memory allocated in `out` and `into` is this stream's, so it is reused after the copies that read it. Memory that
    `read` and `write` touch elsewhere may be freed only when `Copy.done` says so. torch itself keeps pinned memory
    until transfers have read it.
    """

    anywhere = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def out(self, read: Callable[[], Tensor]) -> Copy:
        self.mark().wait(self._stream)
        with torch.cuda.stream(self._stream):
            found = read()
            values = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            values.copy_(found, non_blocking=True)
        return CudaCopy(values, self._stream)

    def mark(self) -> Mark:
        mark: Mark = torch.cuda.current_stream(self._stream.device).record_event()
        return mark

    def into(self, values: Tensor, write: Callable[[Tensor], None], after: Mark | None) -> Copy:
        if after is not None:
            after.wait(self._stream)
        with torch.cuda.stream(self._stream):
            write(values.to(self._stream.device, non_blocking=True))
        return CudaCopy(values, self._stream)


class RegisteredMemory:
    """Pinned memory of exactly the size: torch's own allocator takes the next power of two."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8)
        self._registered = size > 0
        if self._registered:
            check_error(cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0))

    def __del__(self) -> None:
        if self._registered:
            cudart().cudaHostUnregister(self.bytes.data_ptr())


class CudaFeed:
    """A stream of its own, which is ordered with the computing stream by events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def room(self, size: int) -> HostMemory:
        return RegisteredMemory(size)

    def send(self, loads: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        torch.cuda.current_stream(self._stream.device).record_event().wait(self._stream)
        with torch.cuda.stream(self._stream):
            for source, target in loads:
                target.copy_(source, non_blocking=True)
        mark: Mark = self._stream.record_event()
        return mark


class CudaRecorder:
    """Records CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._free = 0

    def start(self) -> None:
        torch.cuda.empty_cache()
        self._free = torch.cuda.mem_get_info(self._device)[0]

    def record(self, launch: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        return graph

    def taken(self) -> int:
        return self._free - torch.cuda.mem_get_info(self._device)[0]


class CudaLink:
    """An NVIDIA GPU; work is queued on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._staging = Staging(device)

    def move(self, tensor: Tensor) -> Tensor:
        large = tensor.device.type == "cpu" and tensor.nbytes >= LEAST and tensor.is_contiguous()
        return self._staging.move(tensor) if large else tensor.to(self.torch_device)

    def upload(self, array: np.ndarray) -> Tensor:
        """The pinned copy needs no reference: torch keeps its memory until the transfer has read it."""
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Download:
        return CudaDownload(tensor)

    def stream(self) -> Lane:
        return CudaLane(self.torch_device)

    def copier(self) -> Copier:
        return CudaCopier(self.torch_device)

    def feed(self) -> Feed:
        return CudaFeed(self.torch_device)

    def event(self) -> Event | None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def recorder(self) -> GraphRecorder | None:
        return CudaRecorder(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
