"""One row's product with a matrix and with the adapter's, in two launches side by side.

The first multiplies the row by A, one rank after the other. The second multiplies it by rows of the matrix, as
`row_kernel` in `nn/ops/triton_gemv.py` does, which takes much longer and need not wait for the first one until it adds
the product with B.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.features.lora.triton_shrink import place_of
from octavo.nn.ops.triton_gemv import ask_for_row, multiply_row
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
    eps,
    num_blocks,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply the row by every n-th row of A, in n programs, WIDE tiles at once; the sums are float32."""
    t = tl.arange(0, WIDE)
    i = tl.arange(0, TILE)
    adapter = tl.load(adapters)
    spans = meta + adapter * (META_PARTS * 4)
    own = blocks + adapter * MAX_BLOCKS
    total = 0
    if adapter >= 0:
        for part in tl.static_range(PARTS):
            total += tl.load(spans + part * 4 + 2)
    lead(OVERLAPS)
    for rank in range(tl.program_id(0), total, tl.num_programs(0)):
        begin, a = 0, 0
        for part in tl.static_range(PARTS):
            ranks = tl.load(spans + part * 4 + 2)
            if rank >= begin and rank < begin + ranks:
                a = tl.load(spans + part * 4) + (rank - begin) * tl.cdiv(K, TILE)
            begin += ranks
        acc = tl.zeros([WIDE, TILE], tl.float32)
        square = tl.zeros([WIDE, TILE], tl.float32)
        for first in range(0, K, WIDE * TILE):
            exists = first + t * TILE < K
            place = place_of(a + first // TILE + t, own, exists, num_blocks, SLICES, SLICE_TILES, TILE)
            at = first + t[:, None] * TILE + i[None, :]
            w = tl.load(pool + place[:, None] + i[None, :], mask=at < K, other=0.0)
            value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            if NORMED:
                square += value * value
                value = value * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * value
        found = tl.sum(tl.sum(acc, 1), 0)
        if NORMED:
            found = found * tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / K + eps)
        tl.store(sums + rank, found)


@triton.jit
def _columns(
    spans,
    n,
    adapter,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return, of the parts of these outputs: ranks, the first of them, first tile of B, tiles of its rows, column.

    Without an adapter, spans are of any one, and there are no ranks.
    """
    ranks = tl.zeros_like(n) + tl.load(spans + 2)
    begin = tl.zeros_like(n)
    b = tl.zeros_like(n) + tl.load(spans + 1)
    row_tiles = tl.zeros_like(n) + (SIZE_0 + TILE - 1) // TILE
    column = n
    if PARTS > 1:
        second = n >= SIZE_0
        begin = tl.where(second, tl.load(spans + 2), begin)
        ranks = tl.where(second, tl.load(spans + 6), ranks)
        b = tl.where(second, tl.load(spans + 5), b)
        row_tiles = tl.where(second, (SIZE_1 + TILE - 1) // TILE, row_tiles)
        column = tl.where(second, n - SIZE_0, column)
    if PARTS > 2:
        third = n >= SIZE_0 + SIZE_1
        begin = tl.where(third, tl.load(spans + 2) + tl.load(spans + 6), begin)
        ranks = tl.where(third, tl.load(spans + 10), ranks)
        b = tl.where(third, tl.load(spans + 9), b)
        row_tiles = tl.where(third, (SIZE_2 + TILE - 1) // TILE, row_tiles)
        column = tl.where(third, n - SIZE_0 - SIZE_1, column)
    return tl.where(adapter >= 0, ranks, 0), begin, b, row_tiles, column


@triton.jit
def _weights_of(
    pool,
    blocks,
    rank,
    ranks,
    b,
    row_tiles,
    column,
    num_blocks,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return some ranks' weights of some outputs: [ranks, outputs] float32."""
    exists = rank[:, None] < ranks[None, :]
    tile = b[None, :] + rank[:, None] * row_tiles[None, :] + (column // TILE)[None, :]
    place = place_of(tile, blocks, exists, num_blocks, SLICES, SLICE_TILES, TILE)
    return tl.load(pool + place + (column % TILE)[None, :], mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _sums_of(sums, rank, ranks, begin):
    """Return some ranks' sums, of the parts of some outputs: [ranks, outputs] float32."""
    return tl.load(sums + begin[None, :] + rank[:, None], mask=rank[:, None] < ranks[None, :], other=0.0)


@triton.jit
def _addition(
    sums,
    pool,
    blocks,
    spans,
    n,
    adapter,
    num_blocks,
    w,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the sums times B, for outputs n; `w` has the weights of their first ranks."""
    r = tl.arange(0, BLOCK_R)
    ranks, begin, b, row_tiles, column = _columns(spans, n, adapter, SIZE_0, SIZE_1, SIZE_2, PARTS, TILE)
    found = tl.sum(w * _sums_of(sums, r, ranks, begin), 0)
    for more in range(BLOCK_R, tl.max(ranks, 0), BLOCK_R):
        w = _weights_of(pool, blocks, more + r, ranks, b, row_tiles, column, num_blocks, SLICES, SLICE_TILES, TILE)
        found += tl.sum(w * _sums_of(sums, more + r, ranks, begin), 0)
    return found


@triton.jit
def _first_weights(
    pool,
    blocks,
    spans,
    n,
    adapter,
    num_blocks,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the weights of the first ranks of outputs n: [BLOCK_R, outputs] float32."""
    ranks, _, b, row_tiles, column = _columns(spans, n, adapter, SIZE_0, SIZE_1, SIZE_2, PARTS, TILE)
    return _weights_of(
        pool, blocks, tl.arange(0, BLOCK_R), ranks, b, row_tiles, column, num_blocks, SLICES, SLICE_TILES, TILE
    )


@triton.jit(do_not_specialize=["num_blocks"])
def adapted_row_kernel(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    pool,
    blocks,
    meta,
    adapters,
    sums,
    eps,
    num_blocks,
    N: tl.constexpr,
    K: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    META_PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute as `row_kernel`, and add the row's sums times B.

    The previous launch is `row_shrink_kernel`, which lets this one begin when the row is there. EARLY: read B before
    the matrix.
    """
    invite(OVERLAPS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_valid = n < N
    inside = tl.minimum(n, N - 1)
    start = weight + n.to(tl.int64)[:, None] * K
    partner = start
    if GATED:
        partner = start + N * K
    if OVERLAPS and AHEAD > 0:
        ask_for_row(weight, start, partner, n_valid, GATED, AHEAD)
    if EARLY:
        adapter = tl.load(adapters)
        spans = meta + tl.maximum(adapter, 0) * (META_PARTS * 4)
        own = blocks + tl.maximum(adapter, 0) * MAX_BLOCKS
        w = _first_weights(
            pool, own, spans, inside, adapter, num_blocks,
            SIZE_0, SIZE_1, SIZE_2, PARTS, SLICES, SLICE_TILES, TILE, BLOCK_R,
        )  # fmt: skip
        if GATED:
            v = _first_weights(
                pool, own, spans, inside + SIZE_0, adapter, num_blocks,
                SIZE_0, SIZE_1, SIZE_2, PARTS, SLICES, SLICE_TILES, TILE, BLOCK_R,
            )  # fmt: skip
    total, partners = multiply_row(x, norm, start, partner, n_valid, eps, N, K, BLOCK_N, BLOCK_K, NORMED, GATED)
    if not EARLY:
        adapter = tl.load(adapters)
        spans = meta + tl.maximum(adapter, 0) * (META_PARTS * 4)
        own = blocks + tl.maximum(adapter, 0) * MAX_BLOCKS
        w = _first_weights(
            pool, own, spans, inside, adapter, num_blocks,
            SIZE_0, SIZE_1, SIZE_2, PARTS, SLICES, SLICE_TILES, TILE, BLOCK_R,
        )  # fmt: skip
        if GATED:
            v = _first_weights(
                pool, own, spans, inside + SIZE_0, adapter, num_blocks,
                SIZE_0, SIZE_1, SIZE_2, PARTS, SLICES, SLICE_TILES, TILE, BLOCK_R,
            )  # fmt: skip
    join(OVERLAPS)
    total += _addition(
        sums, pool, own, spans, inside, adapter, num_blocks, w,
        SIZE_0, SIZE_1, SIZE_2, PARTS, SLICES, SLICE_TILES, TILE, BLOCK_R,
    )  # fmt: skip
    if GATED:
        partners += _addition(
            sums, pool, own, spans, inside + SIZE_0, adapter, num_blocks, v,
            SIZE_0, SIZE_1, SIZE_2, PARTS, SLICES, SLICE_TILES, TILE, BLOCK_R,
        )  # fmt: skip
        total = total / (1.0 + tl.exp(-total)) * partners
    if BIASED:
        total += tl.load(bias + n, mask=n_valid, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(residual + n, mask=n_valid, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n_valid)
