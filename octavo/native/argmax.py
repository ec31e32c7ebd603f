"""The largest value of each row, by the kernels' threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.native.program import Pool


class NativeArgmax:
    """Like `octavo.sampling.sampler.largest`, several times as fast."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __call__(self, values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[S, V] to the index [S] of each row's largest value, the lowest of equals, and the value [S].

        The value is NaN if the row holds one. Raises TypeError if the values are not float32 with adjacent columns.
        """
        if values.dtype != np.float32 or values.strides[1] != values.itemsize:
            raise TypeError(f"values must be float32 with adjacent columns, not {values.dtype} by {values.strides}")
        count, columns = values.shape
        indices, peaks = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
        self._pool.kernels.octavo_argmax(
            self._pool.handle,
            values.ctypes.data,
            values.strides[0] // values.itemsize,
            count,
            columns,
            indices.ctypes.data,
            peaks.ctypes.data,
        )
        return indices, peaks
