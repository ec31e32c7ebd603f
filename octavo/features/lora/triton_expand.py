"""The second half of low-rank additions on a GPU: the sums of `triton_shrink.py` times B, added to a product.

Where a product's halves are a gate and its operand, the launch computes the activation, too, in place of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.features.lora.triton_shrink import place_of
from octavo.nn.ops.triton_overlap import follow


@triton.jit
def part_of(
    program,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return, of the n-th tile of columns of all parts: its part, the part's first column, the tile's first column in
    the part, the part's columns, and the tiles of a row of its B."""
    TILES_0: tl.constexpr = (SIZE_0 + TILE - 1) // TILE
    TILES_1: tl.constexpr = (SIZE_1 + TILE - 1) // TILE
    TILES_2: tl.constexpr = (SIZE_2 + TILE - 1) // TILE
    column = program * TILE
    part, left, size, row_tiles = 0, 0, SIZE_0, TILES_0
    if program >= TILES_0 + TILES_1:
        part, left, size, row_tiles = 2, SIZE_0 + SIZE_1, SIZE_2, TILES_2
        column -= (TILES_0 + TILES_1) * TILE
    elif program >= TILES_0:
        part, left, size, row_tiles = 1, SIZE_0, SIZE_1, TILES_1
        column -= TILES_0 * TILE
    return part, left, column, size, row_tiles


@triton.jit
def expanded(
    shrunk,
    pool,
    blocks,
    spans,
    source,
    used,
    part,
    column,
    size,
    row_tiles,
    num_blocks,
    places,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return a part's addition to some rows, in a tile of its columns: [BLOCK_M, TILE] float32.

    The rows' sums are at `source` [BLOCK_M] in `shrunk`. A row of B takes `row_tiles`, for `size` columns.
    """
    r = tl.arange(0, BLOCK_R)
    i = tl.arange(0, TILE)
    begin = 0
    for other in tl.static_range(PARTS):
        begin += tl.where(other < part, tl.load(spans + other * 4 + 2), 0)
    ranks = tl.load(spans + part * 4 + 2)
    b = tl.load(spans + part * 4 + 1) + column // TILE
    acc = tl.zeros([BLOCK_M, TILE], tl.float32)
    for first in range(0, ranks, BLOCK_R):
        rank = first + r
        exists = rank < ranks
        at = place_of(b + rank * row_tiles, blocks, exists, num_blocks, SLICES, SLICE_TILES, TILE)
        w = tl.load(pool + at[:, None] + i[None, :], mask=exists[:, None] & (column + i < size)[None, :], other=0.0)
        sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            found = shrunk + (split * places.to(tl.int64) + source)[:, None] * RANKS + (begin + rank)[None, :]
            sums += tl.load(found, mask=used[:, None] & exists[None, :], other=0.0)
        acc = tl.dot(sums.to(w.dtype), w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_blocks", "num_tiles", "places"])
def expand_kernel(
    shrunk,
    pool,
    blocks,
    meta,
    order,
    tiles,
    y,
    num_blocks,
    num_tiles,
    places,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add to tiles of rows of y [T, SIZE_0 + SIZE_1 + SIZE_2], in programs [tiles of columns, tiles of rows]."""
    WIDTH: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
    m = tl.arange(0, BLOCK_M)
    i = tl.arange(0, TILE)
    tile = tl.program_id(1)
    adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
    part, left, column, size, row_tiles = part_of(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, TILE)
    follow(OVERLAPS)
    while adapter >= 0:
        spans = meta + adapter * (META_PARTS * 4)
        if tl.load(spans + part * 4 + 2) > 0:
            start = tl.load(tiles + 3 * tile + 1)
            used = m < tl.load(tiles + 3 * tile + 2)
            row = tl.load(order + start + m, mask=used, other=0).to(tl.int64)
            acc = expanded(
                shrunk,
                pool,
                blocks + adapter * MAX_BLOCKS,
                spans,
                start + m,
                used,
                part,
                column,
                size,
                row_tiles,
                num_blocks,
                places,
                PARTS,
                RANKS,
                SLICES,
                SLICE_TILES,
                TILE,
                BLOCK_M,
                BLOCK_R,
                SPLITS,
            )
            target = y + row[:, None] * WIDTH + (left + column + i)[None, :]
            valid = used[:, None] & (column + i < size)[None, :]
            acc += tl.load(target, mask=valid, other=0.0).to(tl.float32)
            tl.store(target, acc.to(y.dtype.element_ty), mask=valid)
        tile += tl.num_programs(1)
        adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)


@triton.jit
def _gate(y, out, row, valid, at, gate, up, SIZE: tl.constexpr):
    """Store silu of the first half plus `gate`, times the second half plus `up`, at columns `at`."""
    source = y + row[:, None] * (2 * SIZE) + at[None, :]
    gate += tl.load(source, mask=valid, other=0.0).to(tl.float32)
    up += tl.load(source + SIZE, mask=valid, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row[:, None] * SIZE + at[None, :], value.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_blocks", "num_tiles", "places", "num_rows", "slots"])
def gate_kernel(
    shrunk,
    pool,
    blocks,
    meta,
    order,
    tiles,
    adapters,
    y,
    out,
    num_blocks,
    num_tiles,
    places,
    num_rows,
    slots,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gate y [T, 2 SIZE] plus the additions of two parts: out [T, SIZE].

    Programs [tiles of columns, slots + tiles of rows]: the first take tiles of rows with adapters, the others the rows
    of the base model.
    """
    ROW_TILES: tl.constexpr = (SIZE + TILE - 1) // TILE
    m = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * TILE
    at = column + tl.arange(0, TILE)
    if tl.program_id(1) >= slots:
        row = (tl.program_id(1) - slots) * BLOCK_M + m
        base = tl.load(adapters + row, mask=row < num_rows, other=0) < 0
        follow(OVERLAPS)
        if tl.max(base.to(tl.int32), 0) > 0:
            zero = tl.zeros([BLOCK_M, TILE], tl.float32)
            _gate(y, out, row.to(tl.int64), base[:, None] & (at < SIZE)[None, :], at, zero, zero, SIZE)
    else:
        tile = tl.program_id(1)
        adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
        follow(OVERLAPS)
        while adapter >= 0:
            start = tl.load(tiles + 3 * tile + 1)
            used = m < tl.load(tiles + 3 * tile + 2)
            row = tl.load(order + start + m, mask=used, other=0).to(tl.int64)
            spans, own = meta + adapter * (META_PARTS * 4), blocks + adapter * MAX_BLOCKS
            gate = expanded(
                shrunk, pool, own, spans, start + m, used, 0, column, SIZE, ROW_TILES, num_blocks, places,
                2, RANKS, SLICES, SLICE_TILES, TILE, BLOCK_M, BLOCK_R, SPLITS,
            )  # fmt: skip
            up = expanded(
                shrunk, pool, own, spans, start + m, used, 1, column, SIZE, ROW_TILES, num_blocks, places,
                2, RANKS, SLICES, SLICE_TILES, TILE, BLOCK_M, BLOCK_R, SPLITS,
            )  # fmt: skip
            _gate(y, out, row, used[:, None] & (at < SIZE)[None, :], at, gate, up, SIZE)
            tile += slots
            adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
