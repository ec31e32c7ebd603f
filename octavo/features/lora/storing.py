"""Write matrices into pages beside a model that computes.

Not by one operation of torch for a large one, which would divide it over threads that wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

ALONE = 1 << 15
"""Most elements of an operation that torch does not divide over threads."""
_WORD = 8


def store(values: Tensor, into: Tensor, factor: float = 1.0) -> None:
    """Write values [n, m] times a factor, converted to the dtype of `into`, beside a model that computes.

    Not in one operation of torch, which would divide it over threads that wait for each other. Numpy also transposes
    small numbers three times as fast.
    """
    if factor != 1.0:
        for part, given in zip(small(into), small(values), strict=True):
            torch.mul(given, factor, out=part)
        return
    if values.dtype != into.dtype:
        for part, given in zip(small(into), small(values), strict=True):
            part.copy_(given)
        return
    integers = torch.int16 if into.dtype.itemsize == 2 else torch.int32
    if _in_words(values) and _in_words(into):
        integers = torch.int64  # short rows, such as those of B, take less time
    np.copyto(into.view(integers).numpy(), values.view(integers).numpy())


def _in_words(matrix: Tensor) -> bool:
    """Whether the rows of [n, m] are whole words of 8 bytes."""
    size = matrix.dtype.itemsize
    starts = matrix.data_ptr(), matrix.storage_offset() * size, matrix.stride(0) * size
    return matrix.stride(1) == 1 and not any(one % _WORD for one in (*starts, matrix.shape[1] * size))


def scale_in_place(values: Tensor, factor: float) -> None:
    """Multiply [n, m] by a factor in place, likewise."""
    if factor == 1.0:
        return
    for part in small(values):
        part.mul_(factor)


def small(matrix: Tensor) -> Iterator[Tensor]:
    """Yield views of at most ALONE elements that make up a matrix [n, m]."""
    rows = max(1, ALONE // matrix.shape[1])
    for part in matrix.split(rows):
        yield from part.split(ALONE, dim=1)
