"""Products with a matrix of 8-bit numbers on a GPU, widened in registers; launched by `floats.py`.

The matrix [N, K] has a scale for each output, or, with TILE above 0, for each tile of TILE outputs and inputs; the
tiles' scales are in rows whose length is a multiple of 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.attention.triton_fp8 import narrow, narrow_by
from octavo.nn.ops.triton_gemv import ask_for
from octavo.nn.ops.triton_overlap import follow


@triton.jit
def floats_row_kernel(
    x,
    norm,
    weight,
    scales,
    bias,
    residual,
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
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply one row by some rows of the matrix, all of one TILE; the partners of GATED rows are N rows below.

    AHEAD numbers of each matrix row are prefetched before the wait.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_valid = n < N
    own = tl.minimum(n, N - 1)
    start = weight + own.to(tl.int64)[:, None] * K
    partner = start + N * K
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gated = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    if TILE > 0:
        tile_scales = scales + tl.program_id(0) * BLOCK_N // TILE * ((K + 4 * TILE - 1) // (4 * TILE) * 4)
        partner_scales = tile_scales + N // TILE * ((K + 4 * TILE - 1) // (4 * TILE) * 4)
    if OVERLAPS and AHEAD > 0:
        line = tl.arange(0, AHEAD // 128) * 128
        ask_for(start + line[None, :])
        if GATED:
            ask_for(partner + line[None, :])
    follow(OVERLAPS)
    for first in range(0, K, BLOCK_K):
        at = first + k
        if K % BLOCK_K == 0:
            w = tl.load(start + at[None, :], eviction_policy="evict_first")
            if GATED:
                up = tl.load(partner + at[None, :], eviction_policy="evict_first")
            value = tl.load(x + at).to(tl.float32)
            if NORMED:
                square += value * value
                value = value * tl.load(norm + at).to(tl.float32)
        else:
            w = tl.load(start + at[None, :], mask=(at < K)[None, :], other=0.0)
            if GATED:
                up = tl.load(partner + at[None, :], mask=(at < K)[None, :], other=0.0)
            value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            if NORMED:
                square += value * value
                value = value * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        if TILE > 0:
            scaled = value * tl.load(tile_scales + at // TILE, mask=at < K, other=0.0)
            acc += w.to(tl.float32) * scaled[None, :]
            if GATED:
                scaled = value * tl.load(partner_scales + at // TILE, mask=at < K, other=0.0)
                gated += up.to(tl.float32) * scaled[None, :]
        else:
            acc += w.to(tl.float32) * value[None, :]
            if GATED:
                gated += up.to(tl.float32) * value[None, :]
    if TILE > 0:
        total = tl.sum(acc, 1)
        if GATED:
            partners = tl.sum(gated, 1)
    else:
        total = tl.sum(acc, 1) * tl.load(scales + own)
        if GATED:
            partners = tl.sum(gated, 1) * tl.load(scales + own + N)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(square, 0) / K + eps)
        total = total * inverse
        if GATED:
            partners = partners * inverse
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * partners
    if BIASED:
        total += tl.load(bias + n, mask=n_valid, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(residual + n, mask=n_valid, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n_valid)


@triton.jit(do_not_specialize=["M"])
def floats_rows_kernel(
    x,
    weight,
    scales,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS_OF_K: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply rows, unrounded, by some rows of the matrix, the left operand of the matrix units. Each of PARTS_OF_K
    programs takes a part of the inputs and stores its product in its own part of `out` [PARTS_OF_K, M, N].

    A TILE above 0 is BLOCK_K and a multiple of BLOCK_N.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + PARTS_OF_K - 1) // PARTS_OF_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    own = tl.minimum(n, N - 1)
    start = weight + own.to(tl.int64)[:, None] * K
    row = x + m.to(tl.int64)[None, :] * K
    m_valid = (m < M)[None, :]
    follow(OVERLAPS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = tl.program_id(1) * SHARE
    for step in range(first, tl.minimum(first + SHARE, STEPS)):
        at = step * BLOCK_K + k
        if K % BLOCK_K == 0:
            w = tl.load(start + at[None, :], eviction_policy="evict_first")
            value = tl.load(row + at[:, None], mask=m_valid, other=0.0)
        else:
            w = tl.load(start + at[None, :], mask=(at < K)[None, :], other=0.0)
            value = tl.load(row + at[:, None], mask=m_valid & (at < K)[:, None], other=0.0)
        if TILE > 0:
            scale = tl.load(scales + tl.program_id(0) * BLOCK_N // TILE * ((STEPS + 3) // 4 * 4) + step)
            acc += tl.dot(w.to(tl.float32).to(value.dtype), value, input_precision="ieee") * scale
        else:
            acc = tl.dot(w.to(tl.float32).to(value.dtype), value, acc, input_precision="ieee")
    if TILE == 0:
        acc *= tl.load(scales + own)[:, None]
    valid = (n < N)[:, None] & m_valid
    place = out + (tl.program_id(1).to(tl.int64) * M + m.to(tl.int64)[None, :]) * N + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _nearest(value, scale, INTEGERS: tl.constexpr):
    """Return the bits of value / scale, rounded to nearest: of E4M3, or of 8-bit INTEGERS."""
    quotient = value * (1.0 / scale)
    if INTEGERS:
        # Adding 1.5 * 2 ** 23 leaves no bits for fractions.
        return (quotient + 12582912.0 - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    return narrow(quotient, 1)


@triton.jit
def _scale_of(value, INTEGERS: tl.constexpr):
    """Return the scale by which the largest magnitude along the last axis becomes the format's."""
    largest = tl.maximum(tl.max(tl.abs(value), len(value.shape) - 1), 1e-12)
    return largest * (1.0 / 127.0) if INTEGERS else largest * (1.0 / 448.0)


@triton.jit
def _rounded(value, scales, inverse, INTEGERS: tl.constexpr, STATIC: tl.constexpr):
    """Return the bits of a row: if STATIC, times the number at `inverse`; else divided by a scale of its own, which is
    stored in `scales`."""
    if STATIC:
        return narrow_by(value, inverse)
    else:
        scale = _scale_of(value, INTEGERS)
        tl.store(scales + tl.program_id(0), scale)
        return _nearest(value, scale, INTEGERS)


@triton.jit
def round_kernel(
    x,
    out,
    scales,
    inverse,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTEGERS: tl.constexpr,
    STATIC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Round each row [SIZE] of x to E4M3 or INTEGERS; see `_rounded`."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row + i, _rounded(value, scales, inverse, INTEGERS, STATIC), mask=i < SIZE)


@triton.jit(do_not_specialize=["stride"])
def round_groups_kernel(
    x, out, scales, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Round each GROUP of a row [SIZE] of x to E4M3 with a scale of its own; scales [groups, stride]."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    group = tl.arange(0, BLOCK // GROUP)
    i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row + i, mask=i < SIZE, other=0.0).to(tl.float32)
    scale = _scale_of(value, False)
    place = scales + group.to(tl.int64) * stride + tl.program_id(0)
    tl.store(place, scale, mask=group * GROUP < SIZE)
    tl.store(out + row + i, _nearest(value, scale[:, None], False), mask=i < SIZE)


@triton.jit
def gate_round_kernel(
    gate_up,
    out,
    scales,
    inverse,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTEGERS: tl.constexpr,
    STATIC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Round silu(first half) * second half of each row [2 SIZE] as `round_kernel`."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * SIZE) + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + i, _rounded(value, scales, inverse, INTEGERS, STATIC), mask=i < SIZE)


@triton.jit
def norm_round_kernel(
    x,
    residual,
    total,
    weight,
    out,
    scales,
    inverse,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTEGERS: tl.constexpr,
    STATIC: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Normalize as `_norm_kernel` of `triton_norm.py`, and round as `round_kernel`."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    valid = i < SIZE
    if PARTS == 0:
        stream = tl.load(x + row + i, mask=valid, other=0.0)
    else:
        wanted = tl.load(residual + row + i, mask=valid, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            place = x + part * tl.num_programs(0).to(tl.int64) * SIZE + row + i
            wanted += tl.load(place, mask=valid, other=0.0).to(tl.float32)
        stream = wanted.to(total.dtype.element_ty)
        tl.store(total + row + i, stream, mask=valid)
    wide = stream.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    value = wide * norm * tl.load(weight + i, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row + i, _rounded(value, scales, inverse, INTEGERS, STATIC), mask=valid)


@triton.jit(do_not_specialize=["M"])
def integers_kernel(
    x_tiles,
    tiles,
    x_scales,
    scales,
    bias,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply rows of 8-bit integers [M, K] by a matrix of them, both given in tiles, and by the scales of both.

    Programs that run at a time have up to BAND tiles of rows, so that they find each other's in the cache.
    """
    follow(OVERLAPS)
    in_band = BAND * ((N + BLOCK_N - 1) // BLOCK_N)
    band = tl.program_id(0) // in_band * BAND
    high = tl.minimum(BAND, tl.cdiv(M, BLOCK_M) - band)
    m = (band + tl.program_id(0) % in_band % high) * BLOCK_M
    n = tl.program_id(0) % in_band // high * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(x_tiles.load([m, k]), tiles.load([n, k]).T, acc, out_dtype=tl.int32)
    row = m + tl.arange(0, BLOCK_M)
    column = n + tl.arange(0, BLOCK_N)
    total = acc.to(tl.float32) * tl.load(x_scales + row, mask=row < M, other=0.0)[:, None]
    total *= tl.load(scales + column, mask=column < N, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])
