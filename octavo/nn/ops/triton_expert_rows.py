"""Kernels of a few tokens' products with their experts, at the speed of reading the matrices.

Every program multiplies one token's row by some rows of one expert's matrix (`triton_gemv.py`), so that experts of
several tokens are read once for each; launched by `expert_products.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_experts import activated, activation_of
from octavo.nn.ops.triton_gemv import multiply_row
from octavo.nn.ops.triton_overlap import follow, invite, join, lead


@triton.jit
def store_row(
    first,
    up,
    bias,
    weights,
    out,
    alpha,
    limit,
    choice,
    expert,
    n,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Store the activated outputs n of a choice, of the sums `first`, and `up` if GATED."""
    PARTS: tl.constexpr = 2 if GATED else 1
    inside = n < N
    if WEIGHTED:
        factor = tl.load(weights + choice)
        first, up = first * factor, up * factor
    own = bias + expert.to(tl.int64) * PARTS * N + n
    if BIASED:
        first += tl.load(own, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            up += tl.load(own + N, mask=inside, other=0.0).to(tl.float32)
        result = activated(first, up, alpha, limit, ACTIVATION)
    else:
        result = activation_of(first, alpha, limit, ACTIVATION)
    tl.store(out + choice * N + n, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["begin"])
def gate_up_row_kernel(
    x,
    norm,
    w,
    bias,
    weights,
    experts,
    out,
    begin,
    eps,
    alpha,
    limit,
    OWNED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute BLOCK_N activated outputs of a choice's first product: out [choices, N] for w [OWNED, 2, N, K], or
    [OWNED, N, K] if not GATED.

    NORMED: of the RMS norm of x, with weight `norm`.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    lead(OVERLAPS)  # launches that follow may read `experts` without waiting
    choice = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + choice) - begin
    if (expert < 0) | (expert >= OWNED):
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    start = w + (expert.to(tl.int64) * PARTS * N + n)[:, None] * K
    partner = start
    if GATED:
        partner = start + N * K
    row = x + choice // TOP_K * K
    first, up = multiply_row(row, norm, start, partner, inside, eps, N, K, BLOCK_N, BLOCK_K, NORMED, GATED)
    store_row(first, up, bias, weights, out, alpha, limit, choice, expert, n, N, GATED, ACTIVATION, BIASED, WEIGHTED)


@triton.jit(do_not_specialize=["begin"])
def down_row_kernel(
    x,
    w,
    bias,
    weights,
    experts,
    added,
    out,
    begin,
    OWNED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADDED: tl.constexpr,
    HELD: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute BLOCK_N outputs of a token, summed over its experts: out [T, N] for x [T, TOP_K, K] and w [OWNED, N, K].

    ADDED: plus `added` [T, N], which may be `out`. HELD: the matrices are loaded before the wait for x; needs BLOCK_K
    of at least K. `experts` are read before it, too: `gate_up_row_kernel` began this launch after waiting for them.
    """
    if HELD:
        invite(OVERLAPS)
    else:
        follow(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    k = tl.arange(0, BLOCK_K)
    if HELD:
        slot = tl.arange(0, SLOTS)
        each = token * TOP_K + slot
        expert = tl.load(experts + each, mask=slot < TOP_K, other=0) - begin
        mine = (slot < TOP_K) & (expert >= 0) & (expert < OWNED)
        row = (expert.to(tl.int64) * N)[None, :] + n[:, None]
        valid = (inside[:, None] & mine[None, :])[:, :, None] & (k < K)[None, None, :]
        held = tl.load(w + row[:, :, None] * K + k[None, None, :], mask=valid, other=0.0, eviction_policy="evict_first")
        factor = tl.load(weights + each, mask=mine, other=0.0) if WEIGHTED else tl.where(mine, 1.0, 0.0)
        join(OVERLAPS)
        value = tl.load(x + each[:, None] * K + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
        value = value.to(tl.float32) * factor[:, None]
        total = tl.sum(tl.sum(held.to(tl.float32) * value[None, :, :], 1), 1)
        if BIASED:
            own = bias + row
            extra = tl.load(own, mask=inside[:, None] & mine[None, :], other=0.0).to(tl.float32)
            total += tl.sum(extra * factor[None, :], 1)
        if ADDED:
            total += tl.load(added + token * N + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=inside)
        return
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    # Unrolled, and added up only after the last expert, so that many loads are under way at once.
    for slot in tl.static_range(TOP_K):
        choice = token * TOP_K + slot
        expert = tl.load(experts + choice) - begin
        mine = (expert >= 0) & (expert < OWNED)
        weight = tl.load(weights + choice) if WEIGHTED else 1.0
        start = w + (expert.to(tl.int64) * N + n)[:, None] * K
        for first in tl.static_range(0, K, BLOCK_K):
            inner = (first + k < K) & mine
            value = tl.load(x + choice * K + first + k, mask=inner, other=0.0).to(tl.float32) * weight
            matrix = tl.load(
                start + first + k[None, :],
                mask=inside[:, None] & inner[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            acc += matrix.to(tl.float32) * value[None, :]
        if BIASED:
            own = bias + expert.to(tl.int64) * N + n
            biases += tl.load(own, mask=inside & mine, other=0.0).to(tl.float32) * weight
    total = tl.sum(acc, 1) + biases
    if ADDED:
        total += tl.load(added + token * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=inside)
