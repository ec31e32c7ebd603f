"""The first half of low-rank additions on a GPU: x times A, for rows with different adapters.

SGMV (Punica, https://arxiv.org/abs/2310.18547): rows are sorted by adapter and cut into tiles, so that a tile reads its
adapter's weights once. They are read where they are, in blocks of the KV cache; see `layout.py`. The ranks of all parts
of a target count through, so a launch serves all its projections: the addition of rank 8 to one part and 16 to another
has 24 ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow


@triton.jit
def place_of(tiles, blocks, valid, num_blocks, SLICES: tl.constexpr, SLICE_TILES: tl.constexpr, TILE: tl.constexpr):
    """Return the places in the pool of tiles of an adapter's range, in elements."""
    part = tiles // SLICE_TILES
    block = tl.load(blocks + part // SLICES, mask=valid, other=0).to(tl.int64)
    return ((part % SLICES) * num_blocks.to(tl.int64) + block) * (SLICE_TILES * TILE) + tiles % SLICE_TILES * TILE


@triton.jit(do_not_specialize=["num_blocks", "num_tiles", "places"])
def shrink_kernel(
    x,
    pool,
    blocks,
    meta,
    order,
    tiles,
    out,
    num_blocks,
    num_tiles,
    places,
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
    SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply tiles of rows by SPLIT inputs of A, in programs [splits, rank blocks, tiles].

    out [splits, places, RANKS]: sums over a split's inputs, by a row's place in `order`.
    """
    k = tl.program_id(0) * SPLIT
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    i = tl.arange(0, TILE)
    out += tl.program_id(0).to(tl.int64) * places * RANKS
    tile = tl.program_id(2)
    adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
    follow(OVERLAPS)
    while adapter >= 0:
        start = tl.load(tiles + 3 * tile + 1)
        used = m < tl.load(tiles + 3 * tile + 2)
        row = tl.load(order + start + m, mask=used, other=0).to(tl.int64)
        spans = meta + adapter * (META_PARTS * 4)
        total = 0
        for part in tl.static_range(PARTS):
            total += tl.load(spans + part * 4 + 2)
        for first in range(tl.program_id(1) * BLOCK_R, total, tl.num_programs(1) * BLOCK_R):
            rank = first + r
            begin = 0
            a = tl.zeros([BLOCK_R], tl.int32)
            for part in tl.static_range(PARTS):
                ranks = tl.load(spans + part * 4 + 2)
                own = tl.load(spans + part * 4) + (rank - begin) * tl.cdiv(K, TILE)
                a = tl.where((rank >= begin) & (rank < begin + ranks), own, a)
                begin += ranks
            exists = rank < total
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for at in range(k, min(k + SPLIT, K), TILE):
                place = place_of(
                    a + at // TILE, blocks + adapter * MAX_BLOCKS, exists, num_blocks, SLICES, SLICE_TILES, TILE
                )
                inside = at + i < K
                w = tl.load(pool + place[:, None] + i[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
                value = tl.load(
                    x + row[:, None] * K + (at + i)[None, :], mask=used[:, None] & inside[None, :], other=0.0
                )
                acc = tl.dot(value.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
            target = out + (start + m)[:, None].to(tl.int64) * RANKS + rank[None, :]
            tl.store(target, acc, mask=used[:, None] & exists[None, :])
        tile += tl.num_programs(2)
        adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
