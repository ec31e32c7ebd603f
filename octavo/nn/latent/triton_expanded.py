"""Expanded latent attention of many queries per row, on a GPU (Dao 2023, https://arxiv.org/abs/2307.08691).

Keys and values are made from latents by one matrix product before the launch. Contexts that are too long to expand at
once take several launches; each continues with the sums of the previous one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expanded_kernel(
    q,
    made,
    latents,
    out,
    sums,
    sums_lse,
    tiles,
    pieces,
    query_start,
    seq_lens,
    scale,
    q_token_stride,
    q_head_stride,
    made_token_stride,
    made_head_stride,
    latent_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RESUMES: tl.constexpr,
    PAUSES: tl.constexpr,
):
    """Attend with one head of one tile of queries to the expanded piece of its row's context.

    `made` [N, HEADS, NOPE + VALUE]: keys and values of the expanded tokens. `latents` [N, RANK + ROPE] has the rotated
    channels of their keys. `tiles`: (row, first query in it) pairs. `pieces`: for each row, the first position of its
    expanded piece, its length and its first token in `made`. `scale` is the softmax scale times log2(e). With PAUSES,
    the sums [T, HEADS, VALUE] float32 and their log-sum-exps are kept instead of the output; RESUMES begins with them.
    """
    head = tl.program_id(0)
    row = tl.load(tiles + 2 * tl.program_id(1))
    first_query = tl.load(tiles + 2 * tl.program_id(1) + 1)
    first = tl.load(pieces + 3 * row)
    length = tl.load(pieces + 3 * row + 1)
    place = tl.load(pieces + 3 * row + 2).to(tl.int64)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    past = tl.load(seq_lens + row) - count

    query = first_query + tl.arange(0, BLOCK_M)
    d, r, v = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_ROPE), tl.arange(0, BLOCK_VALUE)
    valid = query < count
    token = (start + query).to(tl.int64)
    q_place = q + token[:, None] * q_token_stride + head * q_head_stride
    nope_tile = tl.load(q_place + d[None, :], mask=valid[:, None] & (d < NOPE)[None, :], other=0.0)
    rope_tile = tl.load(q_place + NOPE + r[None, :], mask=valid[:, None] & (r < ROPE)[None, :], other=0.0)
    # Positions in the piece: those before `seen` are visible to all queries of the tile, those from `end` on to none.
    position = past + query - first
    end = tl.maximum(tl.minimum(length, past + first_query + BLOCK_M - first), 0)
    seen = tl.maximum(tl.minimum(end, past + first_query + 1 - first), 0) // BLOCK_N * BLOCK_N

    cell = token * HEADS + head
    held = valid[:, None] & (v < VALUE)[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    if RESUMES:
        peak = tl.load(sums_lse + cell, mask=valid, other=float("-inf"))
        total = tl.where(peak > float("-inf"), 1.0, 0.0)
        acc = tl.load(sums + cell[:, None] * VALUE + v[None, :], mask=held, other=0.0)
    made_base = made + place * made_token_stride + head * made_head_stride
    latent_base = latents + place * latent_stride + RANK
    for MASKED in tl.static_range(2):
        for begin in range(0 if MASKED == 0 else seen, seen if MASKED == 0 else end, BLOCK_N):
            key = begin + tl.arange(0, BLOCK_N)
            read = (key < end)[:, None]
            own = made_base + key[:, None] * made_token_stride
            shared = latent_base + key[:, None] * latent_stride + r[None, :]
            if MASKED == 0 and NOPE == BLOCK_NOPE:
                k_tile = tl.load(own + d[None, :])
            else:
                k_tile = tl.load(own + d[None, :], mask=read & (d < NOPE)[None, :], other=0.0)
            if MASKED == 0 and ROPE == BLOCK_ROPE:
                turned = tl.load(shared)
            else:
                turned = tl.load(shared, mask=read & (r < ROPE)[None, :], other=0.0)
            if MASKED == 0 and VALUE == BLOCK_VALUE:
                v_tile = tl.load(own + NOPE + v[None, :])
            else:
                v_tile = tl.load(own + NOPE + v[None, :], mask=read & (v < VALUE)[None, :], other=0.0)
            scores = tl.dot(nope_tile, tl.trans(k_tile), input_precision="ieee")
            scores = tl.dot(rope_tile, tl.trans(turned), scores, input_precision="ieee")
            if MASKED == 1:
                scores = tl.where((key[None, :] <= position[:, None]) & (key < end)[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            safe = new_peak if MASKED == 0 else tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores * scale - safe[:, None])
            decay = tl.exp2(peak - safe)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
            peak = new_peak

    whole = tl.where(total > 0, total, 1.0)
    result = acc / whole[:, None]
    if PAUSES:
        tl.store(sums + cell[:, None] * VALUE + v[None, :], result, mask=held)
        tl.store(sums_lse + cell, tl.where(total > 0, peak + tl.log2(whole), float("-inf")), mask=valid)
    else:
        tl.store(out + cell[:, None] * VALUE + v[None, :], result.to(out.dtype.element_ty), mask=held)
