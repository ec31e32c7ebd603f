"""The first half of low-rank additions on a GPU: x times A, for rows with different adapters.

SGMV (Punica, https://arxiv.org/abs/2310.18547): rows of one adapter are cut into tiles, and a program reads the weights
for a tile once. They are read where they are, in blocks of the KV cache; see `layout.py`. The ranks of all parts of a
target count through, so a launch serves all its projections: the addition of rank 8 to one part and 16 to another has
24 ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import invite, join


@triton.jit
def place_of(tiles, blocks, valid, num_blocks, SLICES: tl.constexpr, SLICE_TILES: tl.constexpr, TILE: tl.constexpr):
    """Return the places in the pool of tiles of an adapter's range, in elements."""
    part = tiles // SLICE_TILES
    block = tl.load(blocks + part // SLICES, mask=valid, other=0).to(tl.int64)
    return ((part % SLICES) * num_blocks.to(tl.int64) + block) * (SLICE_TILES * TILE) + tiles % SLICE_TILES * TILE


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def shrink_kernel(
    x,
    pool,
    blocks,
    meta,
    tiles,
    used,
    out,
    num_blocks,
    num_rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply tiles of rows by WIDE tiles of rows of A: out [splits, num_rows, RANKS], sums over a split's inputs.

    The work [tiles of rows, rank blocks, splits] is divided evenly over any number of programs. The weights are read
    before the previous launch has ended.
    """
    ROW_TILES: tl.constexpr = (K + TILE - 1) // TILE
    SPLITS: tl.constexpr = (ROW_TILES + WIDE - 1) // WIDE
    invite(OVERLAPS)
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    t = tl.arange(0, WIDE)
    i = tl.arange(0, TILE)
    count = tl.load(used) * (PARTS * SPLITS)
    for item in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        split = item % SPLITS
        tile = tiles + item // (PARTS * SPLITS) * (1 + BLOCK_M)
        adapter = tl.load(tile)
        row = tl.load(tile + 1 + m).to(tl.int64)
        spans = meta + adapter * (META_PARTS * 4)
        total = 0
        for part in tl.static_range(PARTS):
            total += tl.load(spans + part * 4 + 2)
        for first in tl.range(item // SPLITS % PARTS * BLOCK_R, total, PARTS * BLOCK_R, num_stages=1):
            rank = first + r
            begin = 0
            a = tl.zeros([BLOCK_R], tl.int32)
            for part in tl.static_range(PARTS):
                ranks = tl.load(spans + part * 4 + 2)
                own = tl.load(spans + part * 4) + (rank - begin) * ROW_TILES
                a = tl.where((rank >= begin) & (rank < begin + ranks), own, a)
                begin += ranks
            exists = rank < total
            at = split * WIDE + t
            read = exists[:, None] & (at < ROW_TILES)[None, :]
            place = place_of(
                a[:, None] + at[None, :], blocks + adapter * MAX_BLOCKS, read, num_blocks, SLICES, SLICE_TILES, TILE
            )
            inside = at[:, None] * TILE + i[None, :] < K
            w = tl.load(
                pool + place[:, :, None] + i[None, None, :], mask=read[:, :, None] & inside[None, :, :], other=0.0
            )
            k = split * (WIDE * TILE) + tl.arange(0, WIDE * TILE)
            join(OVERLAPS)
            value = tl.load(x + row[:, None] * K + k[None, :], mask=(row >= 0)[:, None] & (k < K)[None, :], other=0.0)
            w = tl.reshape(w, [BLOCK_R, WIDE * TILE])
            acc = tl.dot(value.to(w.dtype), tl.trans(w), input_precision="ieee")
            target = out + (split * num_rows.to(tl.int64) + row)[:, None] * RANKS + rank[None, :]
            tl.store(target, acc, mask=(row >= 0)[:, None] & exists[None, :])
    join(OVERLAPS)
