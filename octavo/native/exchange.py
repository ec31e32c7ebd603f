"""`Exchange`: memory in which the ranks on one machine add up and gather arrays, with no other process in between."""

from __future__ import annotations

from octavo.core.errors import DeviceLostError
from octavo.native.bindings import Dtype, open_library


class Exchange:
    """One rank's view of the memory. All ranks call the same methods, and run the same programs, in the same order.

    Sums are computed in float32 in the order of the ranks, by each rank for itself, so all have the same bits. Not
    thread-safe. See `src/exchange.h`.

    Attributes:
        handle: address of the C++ object, for operations of programs.
    """

    def __init__(self, memory: int, rank: int, size: int, limit_s: float | None = None, isa: str = "auto") -> None:
        """
        Args:
            memory: descriptor of a file in memory (memfd_create(2)), empty at first and the same for all ranks. It is
                duplicated, and grows to twice the largest arrays of all ranks.
            limit_s: most seconds to wait for another rank; None for no limit.

        Raises:
            MemoryError: the memory can't be mapped.
            NativeBuildError: the kernels can't be compiled or loaded on this machine.
        """
        self.rank, self.size = rank, size
        self._limit_s = limit_s
        self._kernels = open_library(isa)
        self.handle = self._kernels.octavo_exchange_create(memory, rank, size, limit_s or 0.0)
        if not self.handle:
            raise MemoryError("the memory that the ranks share can't be mapped")

    def all_reduce(self, address: int, count: int, dtype: Dtype) -> None:
        """Replace `count` adjacent numbers, FLOAT or BFLOAT, by their sums over all ranks.

        Raises:
            DeviceLostError: another rank was not there in time.
            MemoryError: the memory can't grow.
        """
        self._check(self._kernels.octavo_exchange_all_reduce(self.handle, address, count, dtype))

    def all_gather(self, address: int, result: int, size: int) -> None:
        """Write all ranks' `size` bytes at `address` to `result`, in the order of the ranks. Raises as `all_reduce`."""
        self._check(self._kernels.octavo_exchange_all_gather(self.handle, address, result, size))

    def lost(self) -> DeviceLostError:
        """Return the error for a rank that was not there in time."""
        missing = self._kernels.octavo_exchange_missing(self.handle)
        return DeviceLostError(
            f"rank {self.rank}", f"rank {missing} did not take part in a sum within {self._limit_s} s (--rank-timeout)"
        )

    def _check(self, failed: int) -> None:
        if failed == 1:
            raise MemoryError("not enough memory for a sum over the ranks")
        if failed:
            raise self.lost()

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._kernels.octavo_exchange_destroy(handle)
