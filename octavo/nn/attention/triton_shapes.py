"""The shapes in which the attention kernels are launched, as `benchmarks/gpu_attention.py --sweep` found them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.nn.attention.triton_fp8 import PLAIN


class Shape(NamedTuple):
    """`queries` and `keys` a tile, warps a program, tiles of keys under way, and the most registers a thread."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def decode_shape(dtype: torch.dtype, block_d: int, form: int) -> Shape:
    """A tile of keys takes at most 16 KiB. Its queries follow from the heads."""
    itemsize = dtype.itemsize if form == PLAIN else 1
    return Shape(0, max(16, min(64, 16384 // (block_d * itemsize))), 4, 3)


def prefill_shape(dtype: torch.dtype, head_dim: int) -> Shape:
    """One for a layer, whatever its cache: tiles are cut once for all layers."""
    if dtype.itemsize == 4:
        return Shape(32, 32, 4, 1)
    return Shape(128, 128, 8, 3) if head_dim <= 128 else Shape(64, 32, 8, 2)
