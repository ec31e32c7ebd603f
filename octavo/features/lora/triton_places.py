"""Where kernels in Triton find adapters in blocks of the KV cache; see `layout.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(tiles, blocks, valid, num_blocks, SLICES: tl.constexpr, SLICE_TILES: tl.constexpr, TILE: tl.constexpr):
    """Return the places in the pool of tiles of an adapter's range, in elements."""
    part = tiles // SLICE_TILES
    block = tl.load(blocks + part // SLICES, mask=valid, other=0).to(tl.int64)
    return ((part % SLICES) * num_blocks.to(tl.int64) + block) * (SLICE_TILES * TILE) + tiles % SLICE_TILES * TILE


@triton.jit
def stride_of(ranks):
    """Return the elements from one output of B to the next: `Geometry.stride`; 0 without ranks."""
    stride = tl.where(ranks > 0, 8, 0)
    for power in tl.static_range(3, 12):
        stride = tl.where(ranks > 1 << power, 2 << power, stride)
    return stride
