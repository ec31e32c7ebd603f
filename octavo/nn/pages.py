"""`LargePages`: memory for data that every step reads, in pages of 2 MiB if the system supports them.

With pages of 4 KiB, a processor needs an address translation for every 64 cache lines. In a virtual machine each
translation goes through the tables of two systems, and reading a model's weights takes up to a tenth longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 1 << 21
_CHUNK = 1 << 28
"""Bytes reserved at once. They take no memory before they are written."""
_LINE = 64
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14 (madvise(2))."""


class LargePages:
    """Allocates tensors consecutively, each aligned to a cache line. Memory is freed once none of them is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts concatenated along rows, like `octavo.nn.weights.fused`. May be called from any thread."""
        rows = sum(len(part) for part in parts)
        place = self._take(sum(part.nbytes for part in parts)).view(parts[0].dtype).view(rows, *parts[0].shape[1:])
        torch.cat(list(parts), out=place)
        return place

    def _take(self, size: int) -> Tensor:
        with self._lock:
            if size > len(self._free):
                self._free = large(max(size, _CHUNK))
            place, self._free = self._free[:size], self._free[-(-size // _LINE) * _LINE :]
        return place


def large(size: int) -> Tensor:
    """Return [size or more] uint8, all 0, aligned to a large page."""
    if sys.platform != "linux":
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _PAGE :]


def populate(memory: Tensor) -> None:
    """Have the system give memory from `large` now instead of when it is first written, which can take longer than the
    write itself. Contents stay, also those that are written meanwhile. Takes about a second for 4 GiB; does nothing
    where the system can't do it."""
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    first = -(-memory.data_ptr() // _PAGE) * _PAGE
    end = memory.data_ptr() + memory.nbytes
    for start in range(first, end - _PAGE + 1, _CHUNK):
        size = min(_CHUNK, (end - start) // _PAGE * _PAGE)
        if advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE):
            return
