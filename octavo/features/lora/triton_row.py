"""One row's product with a matrix and with the adapter's, in two launches side by side.

The first multiplies the row by the adapter's matrices. The second multiplies it by rows of the matrix, as `row_kernel`
in `nn/ops/triton_gemv.py` does, which takes much longer and need not wait for the first one until it adds the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.features.lora.triton_expand import part_of
from octavo.features.lora.triton_shrink import tiles_at
from octavo.nn.ops.triton_gemv import multiply_row
from octavo.nn.ops.triton_overlap import invite, join, lead


@triton.jit(do_not_specialize=["num_blocks"])
def row_addition_kernel(
    x,
    norm,
    pool,
    blocks,
    meta,
    adapters,
    out,
    eps,
    num_blocks,
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
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply the row by A and by WIDE columns of B, in programs [columns]: out [all sizes] float32.

    Each program multiplies by all of its part's A, which costs less than another launch. `norm` scales a NORMED row.
    """
    r = tl.arange(0, BLOCK_R)
    i = tl.arange(0, WIDE)
    k = tl.arange(0, BLOCK_K)
    part, left, column, size = part_of(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, WIDE)
    row_tiles = (size + TILE - 1) // TILE
    at = column + i
    adapter = tl.load(adapters)
    spans = meta + tl.maximum(adapter, 0) * (META_PARTS * 4)
    own = blocks + tl.maximum(adapter, 0) * MAX_BLOCKS
    ranks = tl.where(adapter >= 0, tl.load(spans + part * 4 + 2), 0)
    a, b = tl.load(spans + part * 4), tl.load(spans + part * 4 + 1)
    lead(OVERLAPS)
    total = tl.zeros([WIDE], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, ranks, BLOCK_R):
        exists = first + r < ranks
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for begin in range(0, K, BLOCK_K):
            place = begin + k
            tile = a + (first + r) * tl.cdiv(K, TILE) + begin // TILE
            w = tiles_at(pool, own, tile, exists, K - begin, num_blocks, SLICES, SLICE_TILES, TILE, BLOCK_K)
            value = tl.load(x + place, mask=place < K, other=0.0).to(tl.float32)
            if NORMED:
                if first == 0:
                    square += value * value
                value = value * tl.load(norm + place, mask=place < K, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * value[None, :]
        tile = b + (first + r) * row_tiles + column // TILE
        w = tiles_at(pool, own, tile, exists, size - column, num_blocks, SLICES, SLICE_TILES, TILE, WIDE)
        total += tl.sum(w.to(tl.float32) * tl.sum(acc, 1)[:, None], 0)
    if NORMED and ranks > 0:
        total = total * tl.rsqrt(tl.sum(square, 0) / K + eps)
    tl.store(out + left + at, total, mask=at < size)


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

    That launch is `row_addition_kernel`, which lets this one begin when the row is there.
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
