"""Launch shapes of the attention kernels, measured by `benchmarks/gpu_attention.py --sweep`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from octavo.nn.attention.fp8 import PLAIN


class Shape(NamedTuple):
    """Launch shape of a kernel.

    Attributes:
        queries, keys: of a tile.
        stages: loads in flight; a tile of keys in a paged cache takes two, its block id and itself.
        registers: maximum per thread, so that more programs fit.
        bulk: load this step's own keys with the copy engine of Hopper and later.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    bulk: bool = False


def decode_shape(
    dtype: torch.dtype, block_d: int, form: int, queries: int, *, sparse: bool, wide: bool = False
) -> Shape:
    """Return the shape for tiles of `queries` queries times heads. Programs of one warp need no synchronization, and
    many of them fit; where few are launched (`sparse`), four warps take less time for a tile. Rows with more queries
    than usual (`wide`) may have tiles whose outputs exceed the registers of four."""
    itemsize = dtype.itemsize if form == PLAIN else 1
    if queries == 32 and block_d <= 128 and itemsize == 2:
        return Shape(queries, 64, 2, 3)  # each warp has the rows of one tile of 16
    if queries > 16 or block_d > 128 or itemsize == 4:
        warps = 8 if (wide or block_d > 256) and queries * block_d > 8192 else 4
        return Shape(queries, max(16, min(64, 16384 // (block_d * itemsize))), warps, 3 if block_d <= 256 else 2)
    if form != PLAIN:
        return Shape(queries, 32, 1, 5)
    return Shape(queries, 32, 4 if sparse else 1, 3)


def prefill_shape(dtype: torch.dtype, head_dim: int, longest: int, device: torch.device) -> Shape:
    """Return the shape for rows of at most `longest` queries. The queries of a tile do not depend on `longest`."""
    if head_dim > 256:  # a tile of queries alone takes as much memory as all others with half as many channels
        if dtype.itemsize == 4:
            return Shape(16, 16, 4, 1)
        return Shape(64, 32, 8, 1) if has_large_tiles(device) else Shape(32, 16, 4, 1)
    if dtype.itemsize == 4:
        return Shape(32, 32, 4, 1)
    if head_dim > 128:
        return Shape(128, 64, 8, 2) if has_large_tiles(device) else Shape(64, 32, 8, 2)
    if longest > 4096 and head_dim == 128 and has_large_tiles(device):
        return Shape(128, 128, 8, 3, bulk=True)
    # Two programs per multiprocessor: one multiplies while the other computes exponentials.
    return Shape(128, 64, 8, 2, 128)


@functools.cache
def has_large_tiles(device: torch.device) -> bool:
    """Return whether there are a copy engine and memory for three tiles of 64 KiB: data-center Hopper and Blackwell."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
