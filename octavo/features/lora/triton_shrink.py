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
    sums,
    arrivals,
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
    """Multiply tiles of rows by A: out [num_rows, RANKS], undefined where a row has no such rank.

    The work [tiles of rows, rank blocks, splits of WIDE tiles of A's rows] is divided evenly over any number of
    programs. The weights are read before the previous launch has ended. Of a tile's splits, the last one to end adds up
    all of them in their order, from `sums` [splits, num_rows, RANKS] float32.

    arrivals: [tiles of rows * rank blocks], how many splits have ended; 0 before and after the launch.
    """
    ROW_TILES: tl.constexpr = (K + TILE - 1) // TILE
    SPLITS: tl.constexpr = (ROW_TILES + WIDE - 1) // WIDE
    RANK_BLOCKS: tl.constexpr = (RANKS + BLOCK_R - 1) // BLOCK_R
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
            place = row[:, None] * RANKS + rank[None, :]
            valid = (row >= 0)[:, None] & exists[None, :]
            if SPLITS > 1:
                tl.store(sums + split * num_rows.to(tl.int64) * RANKS + place, acc, mask=valid)
                tl.debug_barrier()
                arrival = arrivals + item // (PARTS * SPLITS) * RANK_BLOCKS + first // BLOCK_R
                if tl.atomic_add(arrival, 1, sem="acq_rel") == SPLITS - 1:
                    total_sum = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                    for other in tl.static_range(SPLITS):
                        found = sums + other * num_rows.to(tl.int64) * RANKS + place
                        total_sum += tl.load(found, mask=valid, other=0.0, cache_modifier=".cg")
                    tl.store(out + place, total_sum.to(out.dtype.element_ty), mask=valid)
                    tl.store(arrival, 0)
            else:
                tl.store(out + place, acc.to(out.dtype.element_ty), mask=valid)
    join(OVERLAPS)
