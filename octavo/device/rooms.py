"""`Rooms`: host memory that is slow to allocate, reserved once and lent again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor


class Rooms:
    """Lends memory. All methods may be called from any thread.

    Args:
        allocate: returns [size] uint8, uninitialized. May take long; it is never called under a lock.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._reserved: dict[int, Tensor] = {}
        """Address -> what was reserved."""
        self._free: set[int] = set()

    def reserve(self, size: int, count: int) -> None:
        """Allocate room for `count` loans of up to `size` bytes at a time. Further and larger ones are allocated when
        they are lent, and not kept: memory that is kept is bounded."""
        for _ in range(count):
            one = self._allocate(size)
            with self._lock:
                self._reserved[one.data_ptr()] = one
                self._free.add(one.data_ptr())

    def lend(self, size: int) -> Tensor:
        """Return [size] uint8, uninitialized."""
        with self._lock:
            fitting = [self._reserved[place] for place in self._free if len(self._reserved[place]) >= size]
            if fitting:
                least = min(fitting, key=len)
                self._free.remove(least.data_ptr())
                return least[:size]
        return self._allocate(size)

    def give_back(self, lent: Tensor) -> None:
        """End a loan. Nothing may read or write the memory any more."""
        with self._lock:
            if lent.data_ptr() in self._reserved:
                self._free.add(lent.data_ptr())
