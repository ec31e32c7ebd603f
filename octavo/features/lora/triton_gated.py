"""The gated product of a feed-forward layer and the additions of a few adapters, in one launch on a Hopper GPU.

The kernel is that of `nn/ops/triton_gated.py`. Before the gate, a tile of the product gets the additions of all
adapters of the step, whose sums are zero for rows of others: the matrix units multiply all rows by each adapter's B,
which for few adapters takes less time than a second pass over the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.features.lora.triton_places import place_of, stride_of
from octavo.nn.ops.triton_gated import gate_halves
from octavo.nn.ops.triton_overlap import follow


@triton.jit
def add_all(
    acc,
    n,
    sums,
    pool,
    blocks,
    meta,
    used,
    own,
    rows,
    M,
    num_blocks,
    splits,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return acc [rows, 2 COLUMNS], the columns from n on of a gate and of its operand, plus the additions.

    AT_ONCE adapters are added in one product over 2 AT_ONCE BLOCK_R ranks: those of an adapter's gate, then those of
    its operand. own: [rows], each row's adapter. 8 ranks of an output are adjacent, and in one tile.
    """
    r = tl.arange(0, 2 * AT_ONCE * BLOCK_R)
    half = r // BLOCK_R % 2
    e = tl.arange(0, AT_ONCE * BLOCK_R // 4)
    half_of_eight = e * 8 // BLOCK_R % 2
    c = tl.arange(0, 2 * COLUMNS)
    i = tl.arange(0, 8)
    column = n + c % COLUMNS
    mine = (c // COLUMNS)[None, :] == half_of_eight[:, None]
    count = tl.load(used + 1)
    for first in tl.range(0, count, AT_ONCE, num_stages=1):
        number = first + r // (2 * BLOCK_R)
        adapter = tl.load(used + 2 + number, mask=number < count, other=-1)
        ranks = tl.load(meta + adapter * (META_PARTS * 4) + half * 4 + 2, mask=number < count, other=0)
        in_eight = first + e * 8 // (2 * BLOCK_R)
        holder = tl.load(used + 2 + in_eight, mask=in_eight < count, other=0)
        spans = meta + holder * (META_PARTS * 4) + half_of_eight * 4
        stride = stride_of(tl.load(spans + 2, mask=in_eight < count, other=0))
        b = tl.load(spans + 1, mask=in_eight < count, other=0)
        for lowest in tl.range(0, tl.max(ranks, 0), BLOCK_R, num_stages=1):
            rank = lowest + r % BLOCK_R
            eight = lowest + e * 8 % BLOCK_R
            element = column[None, :] * stride[:, None] + eight[:, None]
            read = (eight < stride)[:, None] & mine & (column < N)[None, :]
            at = b[:, None] + element // TILE
            place = place_of(at, (blocks + holder * MAX_BLOCKS)[:, None], read, num_blocks, SLICES, SLICE_TILES, TILE)
            place += element % TILE
            w = tl.load(pool + (place[:, :, None] + i[None, None, :]), mask=read[:, :, None], other=0.0)
            exists = (own[:, None] == adapter[None, :]) & (rank < ranks)[None, :]
            value = tl.zeros([acc.shape[0], 2 * AT_ONCE * BLOCK_R], tl.float32)
            for split in tl.range(0, splits, num_stages=1):
                found = sums + ((split * M + rows)[:, None] * 2 + half[None, :]) * RANKS + rank[None, :]
                value += tl.load(found, mask=exists, other=0.0)
            w = tl.reshape(tl.permute(w, (0, 2, 1)), [2 * AT_ONCE * BLOCK_R, 2 * COLUMNS])
            acc = tl.dot(value.to(w.dtype), w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M", "wide", "slim", "num_blocks", "splits"])
def adapted_gated_kernel(
    x_tiles,
    wide_tiles,
    half_tiles,
    quarter_tiles,
    out,
    M,
    wide,
    slim,
    sums,
    pool,
    blocks,
    meta,
    used,
    adapters,
    num_blocks,
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute as `gated_kernel`, and add before the gate."""
    follow(OVERLAPS)
    HALF: tl.constexpr = WIDE // 2
    QUARTER: tl.constexpr = WIDE // 4
    row_tiles = tl.cdiv(M, ROWS)
    side_by_side = tl.num_programs(0) // row_tiles
    first = tl.program_id(0) // row_tiles
    m = tl.program_id(0) % row_tiles * ROWS
    rows = m + tl.arange(0, ROWS)
    own = tl.load(adapters + rows, mask=rows < M, other=-2)
    target = out + rows.to(tl.int64)[:, None] * N
    kind = out.dtype.element_ty
    for tile in range(first, wide, side_by_side):
        n = tile * WIDE
        acc = tl.zeros([ROWS, 2 * WIDE], tl.float32)
        for k in range(0, K, DEPTH):
            x = x_tiles.load([m, k])
            w = wide_tiles.load([0, n, k]).reshape(2 * WIDE, DEPTH)
            acc = tl.dot(x, w.T, acc)
        acc = add_all(
            acc, n, sums, pool, blocks, meta, used, own, rows, M, num_blocks, splits, N, WIDE, RANKS, MAX_BLOCKS,
            META_PARTS, SLICES, SLICE_TILES, TILE, AT_ONCE, BLOCK_R,
        )  # fmt: skip
        column = n + tl.arange(0, WIDE)[None, :]
        tl.store(target + column, gate_halves(acc, ROWS, WIDE).to(kind), mask=(rows < M)[:, None] & (column < N))
    for tile in range(first, slim, side_by_side):
        n = wide * WIDE + tile * (HALF + QUARTER)
        half = tl.zeros([ROWS, 2 * HALF], tl.float32)
        quarter = tl.zeros([ROWS, 2 * QUARTER], tl.float32)
        for k in range(0, K, DEPTH):
            x = x_tiles.load([m, k])
            w = half_tiles.load([0, n, k]).reshape(2 * HALF, DEPTH)
            v = quarter_tiles.load([0, n + HALF, k]).reshape(2 * QUARTER, DEPTH)
            half = tl.dot(x, w.T, half)
            quarter = tl.dot(x, v.T, quarter)
        half = add_all(
            half, n, sums, pool, blocks, meta, used, own, rows, M, num_blocks, splits, N, HALF, RANKS, MAX_BLOCKS,
            META_PARTS, SLICES, SLICE_TILES, TILE, AT_ONCE, BLOCK_R,
        )  # fmt: skip
        quarter = add_all(
            quarter, n + HALF, sums, pool, blocks, meta, used, own, rows, M, num_blocks, splits, N, QUARTER, RANKS,
            MAX_BLOCKS, META_PARTS, SLICES, SLICE_TILES, TILE, AT_ONCE, BLOCK_R,
        )  # fmt: skip
        column = n + tl.arange(0, HALF)[None, :]
        tl.store(target + column, gate_halves(half, ROWS, HALF).to(kind), mask=(rows < M)[:, None] & (column < N))
        column = n + HALF + tl.arange(0, QUARTER)[None, :]
        tl.store(target + column, gate_halves(quarter, ROWS, QUARTER).to(kind), mask=(rows < M)[:, None] & (column < N))
