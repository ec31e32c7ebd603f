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


@triton.jit
def tiles_at(
    pool,
    own,
    tiles,
    exists,
    size,
    num_blocks,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return WIDTH elements from each of these tiles on, a multiple of TILE, and zeros from the `size`-th one on:
    [rows, WIDTH]."""
    t = tl.arange(0, WIDTH // TILE)
    i = tl.arange(0, TILE)
    read = exists[:, None] & (t * TILE < size)[None, :]
    place = place_of(tiles[:, None] + t[None, :], own, read, num_blocks, SLICES, SLICE_TILES, TILE)
    at = (t[:, None] * TILE + i[None, :])[None, :, :]
    found = tl.load(pool + place[:, :, None] + i[None, None, :], mask=read[:, :, None] & (at < size), other=0.0)
    return tl.reshape(found, [tiles.shape[0], WIDTH])


@triton.jit
def _rows_of_a(
    spans,
    own,
    rank,
    pool,
    k,
    num_blocks,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Return some rows of A, counted through all parts, from input k on: [ranks, SPLIT]; and the number of all rows."""
    begin = 0
    a = tl.zeros_like(rank)
    for part in tl.static_range(PARTS):
        ranks = tl.load(spans + part * 4 + 2)
        place = tl.load(spans + part * 4) + (rank - begin) * tl.cdiv(K, TILE)
        a = tl.where((rank >= begin) & (rank < begin + ranks), place, a)
        begin += ranks
    w = tiles_at(pool, own, a + k // TILE, rank < begin, K - k, num_blocks, SLICES, SLICE_TILES, TILE, SPLIT)
    return w, begin


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

    out [splits, places, RANKS]: sums over a split's inputs, by a row's place in `order`. What no kernel writes is read
    before the launch waits for x: the tables, and the first weights.
    """
    k = tl.program_id(0) * SPLIT
    m = tl.arange(0, BLOCK_M)
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = k + tl.arange(0, SPLIT)
    out += tl.program_id(0).to(tl.int64) * places * RANKS
    tile = tl.program_id(2)
    adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
    w = tl.zeros([BLOCK_R, SPLIT], pool.dtype.element_ty)
    total = 0
    if adapter >= 0:
        spans, own = meta + adapter * (META_PARTS * 4), blocks + adapter * MAX_BLOCKS
        w, total = _rows_of_a(
            spans, own, rank, pool, k, num_blocks, K, PARTS, SLICES, SLICE_TILES, TILE, SPLIT
        )  # fmt: skip
    follow(OVERLAPS)
    while adapter >= 0:
        spans, own = meta + adapter * (META_PARTS * 4), blocks + adapter * MAX_BLOCKS
        start = tl.load(tiles + 3 * tile + 1)
        used = m < tl.load(tiles + 3 * tile + 2)
        row = tl.load(order + start + m, mask=used, other=0).to(tl.int64)
        value = tl.load(x + row[:, None] * K + at[None, :], mask=used[:, None] & (at < K)[None, :], other=0.0)
        value = value.to(w.dtype)
        first = tl.program_id(1) * BLOCK_R
        while first < total:
            acc = tl.dot(value, tl.trans(w), input_precision="ieee")
            now = first + tl.arange(0, BLOCK_R)
            target = out + (start + m)[:, None].to(tl.int64) * RANKS + now[None, :]
            tl.store(target, acc, mask=used[:, None] & (now < total)[None, :])
            first += tl.num_programs(1) * BLOCK_R
            if first < total:
                w, total = _rows_of_a(
                    spans, own, first + tl.arange(0, BLOCK_R), pool, k, num_blocks,
                    K, PARTS, SLICES, SLICE_TILES, TILE, SPLIT,
                )  # fmt: skip
        tile += tl.num_programs(2)
        adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
        if adapter >= 0:
            spans, own = meta + adapter * (META_PARTS * 4), blocks + adapter * MAX_BLOCKS
            w, total = _rows_of_a(
                spans, own, rank, pool, k, num_blocks, K, PARTS, SLICES, SLICE_TILES, TILE, SPLIT
            )  # fmt: skip
