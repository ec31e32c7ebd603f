"""Products of few rows with a weight matrix on a GPU, at the speed of reading the matrix.

With a single row, a decoder's operations before and after the product are fused into it: the norm of its input, the
gated activation or the residual addition of its output.

A launch that overlaps the previous one (`triton_overlap.py`) prefetches its weights, which no kernel writes, and waits
only before it reads the results of other kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow


@triton.jit
def ask_for(pointers):
    """Prefetch the cache lines at these addresses, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_for_row(weight, start, partner, n_valid, GATED: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch AHEAD elements of matrix rows at `start`, and of their partners."""
    line = tl.arange(0, AHEAD // 64) * 64
    ask_for(tl.where(n_valid[:, None], start, weight) + line[None, :])
    if GATED:
        ask_for(tl.where(n_valid[:, None], partner, weight) + line[None, :])


@triton.jit
def multiply_held(
    x, norm, start, n_valid, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, NORMED: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Like `multiply_row`, without partners, for BLOCK_K at least K: wait for x when the matrix rows are on their way
    to registers."""
    at = tl.arange(0, BLOCK_K)
    valid = at < K
    w = tl.load(start + at[None, :], mask=n_valid[:, None] & valid[None, :], other=0.0, eviction_policy="evict_first")
    if NORMED:
        scale = tl.load(norm + at, mask=valid, other=0.0).to(tl.float32)
    follow(OVERLAPS)
    value = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    inverse = 1.0
    if NORMED:
        inverse = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
        value = value * scale
    return tl.sum(w.to(tl.float32) * value[None, :], 1) * inverse


@triton.jit
def multiply_row(
    x,
    norm,
    start,
    partner,
    n_valid,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Multiply one row by the matrix rows at `start`; return the products, and those with GATED rows' partners.

    `norm` scales the input, whose root mean square divides the result, in one pass.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gated = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + k
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            w = tl.load(start + at[None, :], eviction_policy="evict_first")
            value = tl.load(x + at).to(tl.float32)
            if GATED:
                up = tl.load(partner + at[None, :], eviction_policy="evict_first")
            if NORMED:
                scale = tl.load(norm + at).to(tl.float32)
        else:
            inside = n_valid[:, None] & (at < K)[None, :]
            w = tl.load(start + at[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(partner + at[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            if NORMED:
                scale = tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        if NORMED:
            square += value * value
            value = value * scale
        acc += w.to(tl.float32) * value[None, :]
        if GATED:
            gated += up.to(tl.float32) * value[None, :]
    total = tl.sum(acc, 1)
    partners = tl.sum(gated, 1)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(square, 0) / K + eps)
        total = total * inverse
        partners = partners * inverse
    return total, partners


@triton.jit
def row_kernel(
    x,
    norm,
    weight,
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
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
):
    """Multiply one row by some rows of the matrix; the partners of GATED rows are N rows below.

    AHEAD elements of each matrix row are prefetched before the wait; with HELD, all are loaded (`multiply_held`).
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_valid = n < N
    start = weight + n.to(tl.int64)[:, None] * K
    partner = start
    if GATED:
        partner = start + N * K
    if HELD:
        total = multiply_held(x, norm, start, n_valid, eps, K, BLOCK_K, NORMED, OVERLAPS)
        partners = total
    else:
        if OVERLAPS and AHEAD > 0:
            ask_for_row(weight, start, partner, n_valid, GATED, AHEAD)
        follow(OVERLAPS)
        total, partners = multiply_row(x, norm, start, partner, n_valid, eps, N, K, BLOCK_N, BLOCK_K, NORMED, GATED)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * partners
    if BIASED:
        total += tl.load(bias + n, mask=n_valid, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(residual + n, mask=n_valid, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n_valid)


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    x,
    weight,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Multiply M rows, at most BLOCK_M, by some rows of the matrix, the left operand of the matrix units.

    ADDED: add the product to `out`.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    n_valid = n < N
    start = weight + n.to(tl.int64)[:, None] * K
    if OVERLAPS and AHEAD > 0:
        line = tl.arange(0, AHEAD // 64) * 64
        ask_for(tl.where(n_valid[:, None], start, weight) + line[None, :])
    follow(OVERLAPS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + k
        m_valid = (m < M)[None, :] & (at < K)[:, None]
        value = tl.load(x + m[None, :] * K + at[:, None], mask=m_valid, other=0.0)
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            w = tl.load(start + at[None, :], eviction_policy="evict_first")
        else:
            inside = n_valid[:, None] & (at < K)[None, :]
            w = tl.load(start + at[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, value.to(w.dtype), acc, input_precision="ieee")
    valid = n_valid[:, None] & (m < M)[None, :]
    place = out + m[None, :] * N + n[:, None]
    if ADDED:
        acc += tl.load(place, mask=valid, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out.dtype.element_ty), mask=valid)
