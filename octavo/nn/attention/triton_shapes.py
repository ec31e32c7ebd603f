"""The shapes in which the attention kernels are launched, as `benchmarks/gpu_attention.py --sweep` found them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.nn.attention.triton_fp8 import PLAIN


class Shape(NamedTuple):
    """How a kernel is launched.

    Attributes:
        queries, keys: of a tile.
        stages: loads under way; a tile of keys in a paged cache takes two of them, its block's id and itself.
        registers: the most a thread gets, so that more programs fit.
        bulk: this step's own keys come by the copy engine of Hopper and later.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    bulk: bool = False


def decode_shape(dtype: torch.dtype, block_d: int, form: int) -> Shape:
    """A tile of keys takes at most 16 KiB. Its queries follow from the heads."""
    itemsize = dtype.itemsize if form == PLAIN else 1
    return Shape(0, max(16, min(64, 16384 // (block_d * itemsize))), 4, 3)


def prefill_shape(dtype: torch.dtype, head_dim: int, longest: int) -> Shape:
    """`longest` is the step's largest number of queries in a row; how many a tile has does not depend on it."""
    if dtype.itemsize == 4:
        return Shape(32, 32, 4, 1)
    if head_dim > 128:
        return Shape(64, 32, 8, 2)
    # Two programs a multiprocessor, of which one multiplies while the other takes exponentials.
    return Shape(128, 64, 8, 2, 128)
