"""The shapes in which the attention kernels are launched, as `benchmarks/gpu_attention.py --sweep` found them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from octavo.nn.attention.fp8 import PLAIN


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


def decode_shape(dtype: torch.dtype, block_d: int, form: int, queries: int) -> Shape:
    """For tiles of so many queries, counting heads. One warp a program waits for no other, and many programs fit."""
    itemsize = dtype.itemsize if form == PLAIN else 1
    if queries > 16 or block_d > 128 or itemsize == 4:
        return Shape(queries, max(16, min(64, 16384 // (block_d * itemsize))), 4, 3)
    return Shape(queries, 32, 1, 3 if form == PLAIN else 5)


def prefill_shape(dtype: torch.dtype, head_dim: int, longest: int, device: torch.device) -> Shape:
    """`longest` is the step's largest number of queries in a row; how many a tile has does not depend on it."""
    if dtype.itemsize == 4:
        return Shape(32, 32, 4, 1)
    if head_dim > 128:
        return Shape(128, 64, 8, 2) if _has_large_tiles(device) else Shape(64, 32, 8, 2)
    if longest > 4096 and head_dim == 128 and _has_large_tiles(device):
        return Shape(128, 128, 8, 3, bulk=True)
    # Two programs a multiprocessor, of which one multiplies while the other takes exponentials.
    return Shape(128, 64, 8, 2, 128)


@functools.cache
def _has_large_tiles(device: torch.device) -> bool:
    """Whether there is a copy engine, and room for three tiles of 64 KiB: data centres' Hopper and Blackwell."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
