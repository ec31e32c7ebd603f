"""One row's product with a matrix and with the adapter's, in three launches that overlap.

The first multiplies the row by A, the second the result by B. The third multiplies the row by rows of the matrix, as
`row_kernel` in `nn/ops/triton_gemv.py` does, which takes much longer and need not wait for the others until it adds the
result. One launch in place of the first two, in which each program multiplies by all of A, is slower on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.features.lora.triton_places import place_of, stride_of
from octavo.nn.ops.triton_gemv import multiply_row
from octavo.nn.ops.triton_overlap import invite, join, lead


@triton.jit(do_not_specialize=["num_blocks"])
def row_shrink_kernel(
    x,
    norm,
    pool,
    blocks,
    meta,
    adapters,
    sums,
    num_blocks,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply WIDE tiles of the row by those of one row of A, in programs [ranks, splits of the row].

    sums [splits, RANKS + 1] float32: the products of a split, and NORMED the split's sum of squares; `norm` scales the
    row. The next launches may use the row without waiting.
    """
    rank = tl.program_id(0)
    first = tl.program_id(1) * (WIDE * TILE)
    t = tl.arange(0, WIDE)
    i = tl.arange(0, TILE)
    adapter = tl.load(adapters)
    spans = meta + tl.maximum(adapter, 0) * (META_PARTS * 4)
    begin, a = 0, 0
    for part in tl.static_range(PARTS):
        ranks = tl.load(spans + part * 4 + 2)
        if rank >= begin and rank < begin + ranks:
            a = tl.load(spans + part * 4) + (rank - begin) * tl.cdiv(K, TILE)
        begin += ranks
    exists = (adapter >= 0) & (rank < begin)
    own = blocks + tl.maximum(adapter, 0) * MAX_BLOCKS
    read = (first + t * TILE < K) & exists
    place = place_of(a + first // TILE + t, own, read, num_blocks, SLICES, SLICE_TILES, TILE)
    at = first + t[:, None] * TILE + i[None, :]
    w = tl.load(pool + place[:, None] + i[None, :], mask=read[:, None] & (at < K), other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.load(norm + at, mask=(at < K) & exists, other=0.0).to(tl.float32)
    lead(OVERLAPS)
    if exists:
        value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        into = sums + tl.program_id(1) * (RANKS + 1)
        if NORMED:
            w = w * scale
            tl.store(into + RANKS, tl.sum(tl.sum(value * value, 1), 0), mask=rank == 0)
        tl.store(into + rank, tl.sum(tl.sum(w * value, 1), 0))


@triton.jit
def part_of(
    program,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return, of the n-th block of columns of all parts: its part, the part's first column, the block's first column in
    the part, and the part's columns."""
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
    return part, left, column, size


@triton.jit
def ranks_of(
    pool,
    blocks,
    rank,
    stride,
    b,
    column,
    inside,
    num_blocks,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return B's elements for some ranks [BLOCK_R] of some outputs [BLOCK_N] of a part, whose B begins at tile `b`."""
    element = column * stride
    place = place_of(b + element // TILE, blocks, inside, num_blocks, SLICES, SLICE_TILES, TILE) + element % TILE
    read = inside[:, None] & (rank < stride)[None, :]
    return tl.load(pool + place[:, None] + rank[None, :], mask=read, other=0.0)


@triton.jit(do_not_specialize=["num_blocks"])
def row_expand_kernel(
    pool,
    blocks,
    meta,
    adapters,
    sums,
    out,
    eps,
    num_blocks,
    K: tl.constexpr,
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
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply the sums by B for BLOCK_N outputs, in programs [blocks of outputs]: out [all sizes] float32."""
    r = tl.arange(0, BLOCK_R)
    part, left, first_column, size = part_of(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, BLOCK_N)
    column = first_column + tl.arange(0, BLOCK_N)
    inside = column < size
    adapter = tl.load(adapters)
    spans = meta + tl.maximum(adapter, 0) * (META_PARTS * 4)
    own = blocks + tl.maximum(adapter, 0) * MAX_BLOCKS
    begin = 0
    for other in tl.static_range(PARTS):
        begin += tl.where(other < part, tl.load(spans + other * 4 + 2), 0)
    ranks = tl.where(adapter >= 0, tl.load(spans + part * 4 + 2), 0)
    b = tl.load(spans + part * 4 + 1)
    stride = stride_of(ranks)
    has = inside & (ranks > 0)
    w = ranks_of(pool, own, r, stride, b, column, has, num_blocks, SLICES, SLICE_TILES, TILE)
    invite(OVERLAPS)  # not earlier: the next launch occupies the memory
    join(OVERLAPS)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, ranks, BLOCK_R):
        exists = first + r < ranks
        if first > 0:
            w = ranks_of(pool, own, first + r, stride, b, column, has, num_blocks, SLICES, SLICE_TILES, TILE)
        value = tl.zeros([BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            value += tl.load(sums + split * (RANKS + 1) + begin + first + r, mask=exists, other=0.0)
        acc += tl.sum(w.to(tl.float32) * value[None, :], 1)
    if NORMED:
        square = 0.0
        for split in tl.static_range(SPLITS):
            square += tl.load(sums + split * (RANKS + 1) + RANKS, mask=ranks > 0, other=0.0)
        acc = tl.where(ranks > 0, acc * tl.rsqrt(square / K + eps), 0.0)
    tl.store(out + left + column, acc, mask=inside)


@triton.jit
def adapted_row_kernel(
    x,
    norm,
    weight,
    bias,
    residual,
    addition,
    out,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute as `row_kernel`, and add the previous launch's result before the activation.

    The launch before the previous one is `row_shrink_kernel`, which lets both begin when the row is there. Beginning
    only when it has ended is slower on an H200.
    """
    invite(OVERLAPS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_valid = n < N
    start = weight + n.to(tl.int64)[:, None] * K
    partner = start
    if GATED:
        partner = start + N * K
    total, partners = multiply_row(x, norm, start, partner, n_valid, eps, N, K, BLOCK_N, BLOCK_K, NORMED, GATED)
    join(OVERLAPS)
    total += tl.load(addition + n, mask=n_valid, other=0.0)
    if GATED:
        partners += tl.load(addition + N + n, mask=n_valid, other=0.0)
        total = total / (1.0 + tl.exp(-total)) * partners
    if BIASED:
        total += tl.load(bias + n, mask=n_valid, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(residual + n, mask=n_valid, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n_valid)
