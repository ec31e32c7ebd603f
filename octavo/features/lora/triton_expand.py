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
    COLUMNS: tl.constexpr,
):
    """Return where a program is that has the n-th COLUMNS of all parts, which begin anew with each part: its part, the
    part's first column, the program's first column in the part, and the part's columns."""
    FIRST: tl.constexpr = (SIZE_0 + COLUMNS - 1) // COLUMNS
    SECOND: tl.constexpr = FIRST + (SIZE_1 + COLUMNS - 1) // COLUMNS
    column = program * COLUMNS
    part, left, size = 0, 0, SIZE_0
    if program >= SECOND:
        part, left, size = 2, SIZE_0 + SIZE_1, SIZE_2
        column -= SECOND * COLUMNS
    elif program >= FIRST:
        part, left, size = 1, SIZE_0, SIZE_1
        column -= FIRST * COLUMNS
    return part, left, column, size


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
    COLUMNS: tl.constexpr,
):
    """Return a part's addition to some rows, in COLUMNS of its `size` columns: [BLOCK_M, COLUMNS] float32.

    The rows' sums are at `source` [BLOCK_M] in `shrunk`. COLUMNS divides TILE.
    """
    r = tl.arange(0, BLOCK_R)
    i = tl.arange(0, COLUMNS)
    row_tiles = (size + TILE - 1) // TILE
    begin = 0
    for other in tl.static_range(PARTS):
        begin += tl.where(other < part, tl.load(spans + other * 4 + 2), 0)
    ranks = tl.load(spans + part * 4 + 2)
    b = tl.load(spans + part * 4 + 1) + column // TILE
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for first in range(0, ranks, BLOCK_R):
        rank = first + r
        exists = rank < ranks
        at = place_of(b + rank * row_tiles, blocks, exists, num_blocks, SLICES, SLICE_TILES, TILE) + column % TILE
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
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add to tiles of rows of y [T, SIZE_0 + SIZE_1 + SIZE_2], in programs [columns, tiles of rows]."""
    WIDTH: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
    m = tl.arange(0, BLOCK_M)
    i = tl.arange(0, COLUMNS)
    tile = tl.program_id(1)
    adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
    part, left, column, size = part_of(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, COLUMNS)
    follow(OVERLAPS)
    while adapter >= 0:
        spans, own = meta + adapter * (META_PARTS * 4), blocks + adapter * MAX_BLOCKS
        if tl.load(spans + part * 4 + 2) > 0:
            start = tl.load(tiles + 3 * tile + 1)
            used = m < tl.load(tiles + 3 * tile + 2)
            row = tl.load(order + start + m, mask=used, other=0).to(tl.int64)
            target = y + row[:, None] * WIDTH + (left + column + i)[None, :]
            valid = used[:, None] & (column + i < size)[None, :]
            product = tl.load(target, mask=valid, other=0.0).to(tl.float32)
            product += expanded(
                shrunk, pool, own, spans, start + m, used, part, column, size, num_blocks, places,
                PARTS, RANKS, SLICES, SLICE_TILES, TILE, BLOCK_M, BLOCK_R, SPLITS, COLUMNS,
            )  # fmt: skip
            tl.store(target, product.to(y.dtype.element_ty), mask=valid)
        tile += tl.num_programs(1)
        adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)


@triton.jit
def _gate(gate, up, out):
    """Return silu(gate) * up in the dtype of `out`."""
    return (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)


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
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gate y [T, 2 SIZE] plus the additions of two parts: out [T, SIZE].

    Programs [columns, slots + tiles of rows]: the first take tiles of rows with adapters, the others the rows of the
    base model.
    """
    m = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * COLUMNS
    at = column + tl.arange(0, COLUMNS)
    if tl.program_id(1) >= slots:
        row = (tl.program_id(1) - slots) * BLOCK_M + m
        base = tl.load(adapters + row, mask=row < num_rows, other=0) < 0
        follow(OVERLAPS)
        if tl.max(base.to(tl.int32), 0) > 0:
            valid = base[:, None] & (at < SIZE)[None, :]
            source = y + row.to(tl.int64)[:, None] * (2 * SIZE) + at[None, :]
            gate = tl.load(source, mask=valid, other=0.0).to(tl.float32)
            up = tl.load(source + SIZE, mask=valid, other=0.0).to(tl.float32)
            tl.store(out + row.to(tl.int64)[:, None] * SIZE + at[None, :], _gate(gate, up, out), mask=valid)
    else:
        tile = tl.program_id(1)
        adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
        follow(OVERLAPS)
        while adapter >= 0:
            start = tl.load(tiles + 3 * tile + 1)
            used = m < tl.load(tiles + 3 * tile + 2)
            row = tl.load(order + start + m, mask=used, other=0).to(tl.int64)
            spans, own = meta + adapter * (META_PARTS * 4), blocks + adapter * MAX_BLOCKS
            valid = used[:, None] & (at < SIZE)[None, :]
            source = y + row[:, None] * (2 * SIZE) + at[None, :]
            gate = tl.load(source, mask=valid, other=0.0).to(tl.float32)
            up = tl.load(source + SIZE, mask=valid, other=0.0).to(tl.float32)
            gate += expanded(
                shrunk, pool, own, spans, start + m, used, 0, column, SIZE, num_blocks, places,
                2, RANKS, SLICES, SLICE_TILES, TILE, BLOCK_M, BLOCK_R, SPLITS, COLUMNS,
            )  # fmt: skip
            up += expanded(
                shrunk, pool, own, spans, start + m, used, 1, column, SIZE, num_blocks, places,
                2, RANKS, SLICES, SLICE_TILES, TILE, BLOCK_M, BLOCK_R, SPLITS, COLUMNS,
            )  # fmt: skip
            tl.store(out + row[:, None] * SIZE + at[None, :], _gate(gate, up, out), mask=valid)
            tile += slots
            adapter = tl.load(tiles + 3 * tile, mask=tile < num_tiles, other=-1)
