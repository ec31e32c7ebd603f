"""Low-rank additions to the products of experts, for choices that are sorted by expert.

A program has some places of one tile, which have one expert. Places of one adapter are together, so that most programs
have one or two. A program computes one adapter after another, for all its places, and keeps each place's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.features.lora.triton_places import place_of, stride_of
from octavo.features.lora.triton_row import ranks_of
from octavo.nn.ops.triton_overlap import follow


@triton.jit
def _places(tiles, order, adapters, program, TOP_K: tl.constexpr, HEIGHT: tl.constexpr, ROWS: tl.constexpr):
    """Return the program's expert, its places, and their choices and adapters; those past the tile have adapter -1."""
    SHARES: tl.constexpr = HEIGHT // ROWS
    tile = tiles + program // SHARES * 3
    start, count = tl.load(tile + 1), tl.load(tile + 2)
    within = tl.arange(0, HEIGHT)
    choice = tl.load(order + start + within, mask=within < count, other=0)
    adapter = tl.load(adapters + choice // TOP_K, mask=within < count, other=-1)
    if SHARES > 1:
        ordered = tl.sort((adapter + 1) * HEIGHT + within)
        mine = tl.gather(ordered, program % SHARES * ROWS + tl.arange(0, ROWS), 0)
        within, adapter = mine % HEIGHT, mine // HEIGHT - 1
        choice = tl.gather(choice, within, 0)
    return tl.load(tile), (start + within).to(tl.int64), choice.to(tl.int64), adapter


@triton.jit
def _next(adapter, current):
    """Return the largest of the adapters below `current`; -1 if there is none."""
    return tl.max(tl.where(adapter < current, adapter, -1), 0)


@triton.jit(do_not_specialize=["num_blocks", "first_target"])
def expert_shrink_kernel(
    x,
    pool,
    blocks,
    meta,
    adapters,
    order,
    tiles,
    sums,
    num_blocks,
    first_target,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX_ADAPTERS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply x [places, K] by BLOCK_R rows of A, in programs [ROWS places, parts, RANKS / BLOCK_R].

    sums: [places, PARTS * RANKS] float32, undefined where a place has no such rank.
    """
    follow(OVERLAPS)
    expert, place, _, adapter = _places(tiles, order, adapters, tl.program_id(0), TOP_K, HEIGHT, ROWS)
    part = tl.program_id(1)
    rank = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.arange(0, TILE)
    row_tiles = tl.cdiv(K, TILE)
    current = _next(adapter, MAX_ADAPTERS)
    while current >= 0:
        span = meta + (((first_target + 2 * expert) * MAX_ADAPTERS + current) * META_PARTS + part) * 4
        a, ranks = tl.load(span), tl.load(span + 2)
        own = blocks + current * MAX_BLOCKS
        mine = adapter == current
        if tl.program_id(2) * BLOCK_R < ranks:
            exists = rank < ranks
            acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
            for tile in range(row_tiles):
                at = tile * TILE + i
                source = place_of(a + rank * row_tiles + tile, own, exists, num_blocks, SLICES, SLICE_TILES, TILE)
                read = exists[:, None] & (at < K)[None, :]
                w = tl.load(pool + source[:, None] + i[None, :], mask=read, other=0.0)
                value = tl.load(x + place[:, None] * K + at[None, :], mask=mine[:, None] & (at < K)[None, :], other=0.0)
                acc = tl.dot(value.to(w.dtype), w.T, acc, input_precision=PRECISION)
            into = sums + (place[:, None] * PARTS + part) * RANKS + rank[None, :]
            tl.store(into, acc, mask=mine[:, None] & exists[None, :])
        current = _next(adapter, current)


@triton.jit(do_not_specialize=["num_blocks", "first_target"])
def expert_expand_kernel(
    sums,
    pool,
    blocks,
    meta,
    adapters,
    order,
    tiles,
    y,
    num_blocks,
    first_target,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_CHOICE: tl.constexpr,
    MAX_ADAPTERS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the sums times B to y [rows, PARTS * N], in programs [ROWS places, parts, N / BLOCK_N].

    BY_CHOICE: y has a row for each choice; otherwise for each place.
    """
    follow(OVERLAPS)
    expert, place, choice, adapter = _places(tiles, order, adapters, tl.program_id(0), TOP_K, HEIGHT, ROWS)
    current = _next(adapter, MAX_ADAPTERS)
    if current < 0:
        return
    part = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    while current >= 0:
        span = meta + (((first_target + 2 * expert) * MAX_ADAPTERS + current) * META_PARTS + part) * 4
        b, ranks = tl.load(span + 1), tl.load(span + 2)
        own = blocks + current * MAX_BLOCKS
        stride = stride_of(ranks)
        mine = adapter == current
        for first in range(0, ranks, BLOCK_R):
            rank = first + r
            w = ranks_of(pool, own, rank, stride, b, column, inside, num_blocks, SLICES, SLICE_TILES, TILE)
            source = sums + (place[:, None] * PARTS + part) * RANKS + rank[None, :]
            value = tl.load(source, mask=mine[:, None] & (rank < ranks)[None, :], other=0.0)
            acc = tl.dot(value.to(w.dtype), w.T, acc, input_precision=PRECISION)
        current = _next(adapter, current)
    target = y + ((choice if BY_CHOICE else place)[:, None] * PARTS + part) * N + column[None, :]
    changed = (adapter >= 0)[:, None] & inside[None, :]
    before = tl.load(target, mask=changed, other=0.0)
    tl.store(target, (before.to(tl.float32) + acc).to(y.dtype.element_ty), mask=changed)
