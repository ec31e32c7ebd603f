"""Products with a matrix of 8-bit floating-point numbers on a GPU, widened in registers; launched by `floats.py`.

The matrix [N, K] has a scale for each output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.attention.triton_fp8 import narrow
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
    OVERLAPS: tl.constexpr,
):
    """Multiply one row by some rows of the matrix; the partners of GATED rows are N rows below."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_valid = n < N
    own = tl.minimum(n, N - 1)
    start = weight + own.to(tl.int64)[:, None] * K
    partner = start + N * K
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gated = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
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
        acc += w.to(tl.float32) * value[None, :]
        if GATED:
            gated += up.to(tl.float32) * value[None, :]
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
    OVERLAPS: tl.constexpr,
):
    """Multiply rows, unrounded, by some rows of the matrix, the left operand of the matrix units. Each of PARTS_OF_K
    programs takes a part of the inputs and stores its product in its own part of `out` [PARTS_OF_K, M, N]."""
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
        acc = tl.dot(w.to(tl.float32).to(value.dtype), value, acc, input_precision="ieee")
    acc *= tl.load(scales + own)[:, None]
    valid = (n < N)[:, None] & m_valid
    place = out + (tl.program_id(1).to(tl.int64) * M + m.to(tl.int64)[None, :]) * N + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=valid)


@triton.jit
def round_kernel(x, out, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Round each row [SIZE] of x to E4M3, divided by a scale by which its largest magnitude becomes the format's."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row + i, mask=i < SIZE, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) * (1.0 / 448.0)
    tl.store(scales + tl.program_id(0), scale)
    tl.store(out + row + i, narrow(value * (1.0 / scale), 1), mask=i < SIZE)


@triton.jit
def gate_round_kernel(gate_up, out, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Round silu(first half) * second half of each row [2 SIZE] as `round_kernel`."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * SIZE) + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) * (1.0 / 448.0)
    tl.store(scales + row, scale)
    tl.store(out + row * SIZE + i, narrow(value * (1.0 / scale), 1), mask=i < SIZE)


@triton.jit
def norm_round_kernel(
    x,
    residual,
    total,
    weight,
    out,
    scales,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
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
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    value = wide * inverse * tl.load(weight + i, mask=valid, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) * (1.0 / 448.0)
    tl.store(scales + tl.program_id(0), scale)
    tl.store(out + row + i, narrow(value * (1.0 / scale), 1), mask=valid)
