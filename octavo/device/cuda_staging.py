"""`Staging`: copies of pageable host memory to an NVIDIA GPU, through pinned memory."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import torch
from torch import Tensor

LEAST = 1 << 20
"""Bytes of a tensor for which this is faster."""
PIECE = 16 << 20
"""Bytes that are copied at a time. Threads wait for their turn in Python after each call: on an H200, pieces of 4 MiB
came at 7 GB/s, these at 9."""
COUNT = 12
"""Pieces in pinned memory. It is kept: pinning takes longer than copying."""


class _Room:
    """Pinned memory for one piece, and the event after the transfer that reads it."""

    def __init__(self) -> None:
        self.memory = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self.read = torch.cuda.Event()


class Staging:
    """Moves tensors of the host to a GPU; may be called from any thread.

    CUDA copies pageable memory through buffers of its own, for one thread at a time: files in the page cache are loaded
    at about 5 GB/s, however many threads load. Here each thread fills pieces of its own, while those of others are on
    their way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._made = 0
        self._rooms: SimpleQueue[_Room] = SimpleQueue()

    def move(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor of the host on the GPU. Work launched later on this thread's stream sees it."""
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (one.view(-1).view(torch.uint8) for one in (tensor, moved))
        for piece, into in zip(source.split(PIECE), target.split(PIECE), strict=True):
            room = self._take()
            try:
                room.read.synchronize()
                host = room.memory[: len(piece)]
                host.copy_(piece)
                into.copy_(host, non_blocking=True)
                room.read.record()
            finally:
                self._rooms.put(room)
        return moved

    def _take(self) -> _Room:
        """Return a new room, or once there are `COUNT` the one that was used longest ago."""
        with self._lock:
            if self._made < COUNT:
                room = _Room()
                self._made += 1
                return room
        return self._rooms.get()
