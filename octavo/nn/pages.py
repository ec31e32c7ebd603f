"""`LargePages`: memory for what every step reads, in pages of 2 MiB where the system has them.

With pages of 4 KiB a processor looks one up for every 64 lines that it reads. In a virtual machine each look-up goes
through the tables of two systems, and reading a model's weights takes up to a tenth longer.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 1 << 21
_CHUNK = 1 << 28
"""Asked for at once. It takes no memory before it is written."""
_LINE = 64


class LargePages:
    """Tensors one after the other, each from a cache line on. The memory is free once none of them is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts one below the other, as `octavo.nn.weights.fused` gives them. Any thread may call it."""
        rows = sum(len(part) for part in parts)
        place = self._take(sum(part.nbytes for part in parts)).view(parts[0].dtype).view(rows, *parts[0].shape[1:])
        torch.cat(list(parts), out=place)
        return place

    def _take(self, size: int) -> Tensor:
        with self._lock:
            if size > len(self._free):
                self._free = _chunk(max(size, _CHUNK))
            place, self._free = self._free[:size], self._free[-(-size // _LINE) * _LINE :]
        return place


def _chunk(size: int) -> Tensor:
    """[size or more] uint8, from the beginning of a large page on."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _PAGE :]
