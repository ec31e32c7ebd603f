"""The second half of low-rank additions on a GPU: the sums of `triton_shrink.py` times B, added to a product.

Where a product's halves are a gate and its operand, the launch computes the activation, too, in place of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.features.lora.triton_shrink import place_of
from octavo.nn.ops.triton_overlap import follow, invite, join


@triton.jit
def part_of(
    program,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return, of the n-th block of columns of all parts: its part, the part's first column, the block's first column in
    the part, the part's columns, and the tiles of a row of its B."""
    BLOCKS_0: tl.constexpr = (SIZE_0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = (SIZE_1 + BLOCK_N - 1) // BLOCK_N
    column = program * BLOCK_N
    part, left, size = 0, 0, SIZE_0
    if program >= BLOCKS_0 + BLOCKS_1:
        part, left, size = 2, SIZE_0 + SIZE_1, SIZE_2
        column -= (BLOCKS_0 + BLOCKS_1) * BLOCK_N
    elif program >= BLOCKS_0:
        part, left, size = 1, SIZE_0, SIZE_1
        column -= BLOCKS_0 * BLOCK_N
    return part, left, column, size, tl.cdiv(size, TILE)


@triton.jit
def columns_of(
    pool,
    blocks,
    rank,
    ranks,
    b,
    column,
    size,
    row_tiles,
    num_blocks,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return B's columns for some ranks of a part, [BLOCK_R, BLOCK_N].

    The part's B begins at tile `b`; a row of B takes `row_tiles`, for `size` columns. The columns are in one tile.
    """
    i = tl.arange(0, BLOCK_N)
    exists = rank < ranks
    at = place_of(b + column // TILE + rank * row_tiles, blocks, exists, num_blocks, SLICES, SLICE_TILES, TILE)
    at += tl.multiple_of(column % TILE, BLOCK_N)
    return tl.load(pool + at[:, None] + i[None, :], mask=exists[:, None] & (column + i < size)[None, :], other=0.0)


@triton.jit
def sums_of(shrunk, row, begin, rank, ranks, RANKS: tl.constexpr):
    """Return the rows' sums of some ranks of a part, whose ranks begin at `begin`: [BLOCK_M, BLOCK_R]."""
    found = shrunk + row[:, None] * RANKS + (begin + rank)[None, :]
    return tl.load(found, mask=(row >= 0)[:, None] & (rank < ranks)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_blocks"])
def expand_kernel(
    shrunk,
    pool,
    blocks,
    meta,
    tiles,
    used,
    y,
    num_blocks,
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
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add to rows of y [T, SIZE_0 + SIZE_1 + SIZE_2].

    The work [tiles of rows, blocks of columns] is divided evenly over any number of programs.
    """
    WIDTH: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
    COLUMNS: tl.constexpr = tl.cdiv(SIZE_0, BLOCK_N) + tl.cdiv(SIZE_1, BLOCK_N) + tl.cdiv(SIZE_2, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    i = tl.arange(0, BLOCK_N)
    count = tl.load(used) * COLUMNS
    invite(OVERLAPS)
    for item in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        part, left, column, size, row_tiles = part_of(item % COLUMNS, SIZE_0, SIZE_1, SIZE_2, BLOCK_N, TILE)
        tile = tiles + item // COLUMNS * (1 + BLOCK_M)
        adapter = tl.load(tile)
        row = tl.load(tile + 1 + m).to(tl.int64)
        spans = meta + adapter * (META_PARTS * 4)
        begin = 0
        for other in tl.static_range(PARTS):
            begin += tl.where(other < part, tl.load(spans + other * 4 + 2), 0)
        ranks = tl.load(spans + part * 4 + 2)
        b = tl.load(spans + part * 4 + 1)
        own = blocks + adapter * MAX_BLOCKS
        w = columns_of(pool, own, r, ranks, b, column, size, row_tiles, num_blocks, SLICES, SLICE_TILES, TILE, BLOCK_N)
        join(OVERLAPS)
        if ranks > 0:
            target = y + row[:, None] * WIDTH + (left + column + i)[None, :]
            valid = (row >= 0)[:, None] & (column + i < size)[None, :]
            before = tl.load(target, mask=valid, other=0.0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for first in tl.range(0, ranks, BLOCK_R, num_stages=1):
                if first > 0:
                    w = columns_of(
                        pool, own, first + r, ranks, b, column, size, row_tiles, num_blocks, SLICES, SLICE_TILES, TILE,
                        BLOCK_N,
                    )  # fmt: skip
                sums = sums_of(shrunk, row, begin, first + r, ranks, RANKS)
                acc = tl.dot(sums, w, acc, input_precision="ieee")
            tl.store(target, (acc + before.to(tl.float32)).to(y.dtype.element_ty), mask=valid)
    join(OVERLAPS)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def gate_kernel(
    shrunk,
    pool,
    blocks,
    meta,
    tiles,
    used,
    adapters,
    y,
    out,
    num_blocks,
    num_rows,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gate y [num_rows, 2 SIZE] plus the additions of two parts: out [num_rows, SIZE].

    The work is divided evenly over any number of programs: first [tiles of rows with adapters, blocks of columns], then
    likewise all rows, where only those of the base model are computed.
    """
    COLUMNS: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    ROW_TILES: tl.constexpr = (SIZE + TILE - 1) // TILE
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    i = tl.arange(0, BLOCK_N)
    adapted = tl.load(used)
    count = (adapted + tl.cdiv(num_rows, BLOCK_M)) * COLUMNS
    follow(OVERLAPS)
    for item in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=1):
        number = item // COLUMNS
        column = item % COLUMNS * BLOCK_N
        at = column + i
        adapter = tl.load(tiles + number * (1 + BLOCK_M), mask=number < adapted, other=0)
        row = tl.load(tiles + number * (1 + BLOCK_M) + 1 + m, mask=number < adapted, other=-1)
        if number >= adapted:
            row = (number - adapted) * BLOCK_M + m
            row = tl.where(tl.load(adapters + row, mask=row < num_rows, other=0) < 0, row, -1)
        row = row.to(tl.int64)
        source = y + row[:, None] * (2 * SIZE) + at[None, :]
        valid = (row >= 0)[:, None] & (at < SIZE)[None, :]
        gate_before = tl.load(source, mask=valid, other=0.0)
        up_before = tl.load(source + SIZE, mask=valid, other=0.0)
        spans, own = meta + adapter * (META_PARTS * 4), blocks + adapter * MAX_BLOCKS
        gate_ranks, up_ranks = tl.load(spans + 2), tl.load(spans + 6)
        gate_b, up_b = tl.load(spans + 1), tl.load(spans + 5)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        ranks = tl.where(number < adapted, tl.maximum(gate_ranks, up_ranks), 0)
        for first in tl.range(0, ranks, BLOCK_R, num_stages=1):
            rank = first + r
            gate_w = columns_of(
                pool, own, rank, gate_ranks, gate_b, column, SIZE, ROW_TILES, num_blocks, SLICES, SLICE_TILES, TILE,
                BLOCK_N,
            )  # fmt: skip
            up_w = columns_of(
                pool, own, rank, up_ranks, up_b, column, SIZE, ROW_TILES, num_blocks, SLICES, SLICE_TILES, TILE,
                BLOCK_N,
            )  # fmt: skip
            gate_sums = sums_of(shrunk, row, 0, rank, gate_ranks, RANKS)
            up_sums = sums_of(shrunk, row, gate_ranks, rank, up_ranks, RANKS)
            gate = tl.dot(gate_sums, gate_w, gate, input_precision="ieee")
            up = tl.dot(up_sums, up_w, up, input_precision="ieee")
        gate += gate_before.to(tl.float32)
        up += up_before.to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + row[:, None] * SIZE + at[None, :], value.to(out.dtype.element_ty), mask=valid)
