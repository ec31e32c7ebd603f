"""Attention of many queries per row over a paged context, on a GPU (Dao 2023, https://arxiv.org/abs/2307.08691).

A batch is a list of tiles, each of consecutive queries of one row, so that rows of all lengths share one launch. Keys
of earlier steps are read from the cache through the block table; this step's own keys are read from the projection's
output if available, where they are contiguous and, unlike in an FP8 cache, not rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.attention.triton_decode import LOG2_E, first_visible, seen, seen_end
from octavo.nn.attention.triton_fp8 import narrow_by, unit, widen


@triton.jit
def _weigh(
    scores,
    visible,
    distance,
    slope,
    peak,
    total,
    scale,
    soft_cap,
    CAPPED: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return one tile's softmax weights, the scale factor of earlier results, and the new peak and total."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); scaled scores include the factor log2(e) for exp2.
        scores = scores * scale
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / soft_cap) * LOG2_E) + 1.0))
        scores = scores * (LOG2_E / scale)
    if HAS_SLOPES:
        scores = scores + distance * (slope / scale)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    # One fused multiply-add per element, because the scale is applied here and not to the scores.
    weights = tl.exp2(scores * scale - safe[:, None])
    decay = tl.exp2(peak - safe)
    return weights, decay, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def prefill_kernel(
    q,
    fresh,
    fresh_tiles,
    cache,
    cache_scales,
    out,
    inverse,
    tiles,
    query_start,
    seq_lens,
    table_rows,
    tables,
    scale,
    soft_cap,
    sinks,
    slopes,
    unseen,
    ahead,
    q_token_stride,
    q_head_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    table_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BRANCHES: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    BULK: tl.constexpr,
    ROUNDED: tl.constexpr,
    FORM: tl.constexpr,
    MEANS: tl.constexpr,
):
    """Attend with one query head of one tile. `tiles`: (row, first query in the row) pairs.

    `fresh` [T, KV_HEADS + KV_HEADS, D]: this step's keys and values, in rows of q's stride. An FP8 cache (FORM,
    `triton_fp8.py`) is given as 16-bit words, with strides in words.
    BRANCHES, ROUNDED: see `decode_kernel`. AHEAD: see `StepInput.ahead`.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    kv_head = head // GROUP
    row = tl.load(tiles + 2 * tl.program_id(1))
    first_query = tl.load(tiles + 2 * tl.program_id(1) + 1)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows + row)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    table = tables + table_row.to(tl.int64) * table_stride

    query = first_query + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    valid = (query < count)[:, None] & (d < D)[None, :]
    token = (start + query).to(tl.int64)
    q_place = q + token[:, None] * q_token_stride + head * q_head_stride
    q_tile = tl.load(q_place + d[None, :], mask=valid, other=0.0)
    past = seq_len - count
    position = past + query
    # Keys before `visible_end` are visible to all queries of the tile, those from `end` on to none.
    visible_end = past + first_query + 1
    if BRANCHES:
        words = tl.load(unseen + token, mask=query < count, other=0)
        visible_end = seen_end(past + first_query, words, query - first_query)
    end = tl.minimum(seq_len, past + first_query + BLOCK_M)
    last = query
    if AHEAD:
        last = query + tl.load(ahead + token, mask=query < count, other=0)
        end = past + tl.max(tl.where(query < count, last + 1, 0), 0)
    begin = 0
    if WINDOW > 0:
        visible_end = 0
        begin = tl.maximum(first_visible(past + first_query, WINDOW, CHUNKED), 0) // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        peak = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head) * LOG2_E
        total = total + 1.0
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + head) * LOG2_E
    WIDTH: tl.constexpr = BLOCK_D if FORM == 0 else BLOCK_D // 2
    USED: tl.constexpr = D if FORM == 0 else D // 2
    w = tl.arange(0, WIDTH)
    paged_end = tl.minimum(end, past) if HAS_FRESH else end
    paged_seen = tl.minimum(visible_end, paged_end) // BLOCK_N * BLOCK_N
    paged_scale = scale
    value_unit = 1.0
    if FORM > 0:
        # A sixteenth keeps queries of any model within float16. A prompt's first chunk has nothing in the cache and
        # needs none of this, which would take as long as a few tiles of keys.
        half_valid = (query < count)[:, None] & (w < USED)[None, :] & (paged_end > begin)
        q_even = (tl.load(q_place + 2 * w[None, :], mask=half_valid, other=0.0) * 0.0625).to(tl.float16)
        q_odd = (tl.load(q_place + 2 * w[None, :] + 1, mask=half_valid, other=0.0) * 0.0625).to(tl.float16)
        paged_scale = scale * 16.0 * unit(FORM, MEANS) * tl.load(cache_scales + kv_head)
        value_unit = unit(FORM, MEANS) * tl.load(cache_scales + KV_HEADS + kv_head)
        acc_even = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    head_base = cache + kv_head.to(tl.int64) * kv_head_stride
    for MASKED in tl.static_range(2):
        phase_begin = begin if MASKED == 0 else tl.maximum(begin, paged_seen)
        for first in range(phase_begin, paged_seen if MASKED == 0 else paged_end, BLOCK_N):
            key = first + tl.arange(0, BLOCK_N)
            if MASKED == 0:
                block = tl.load(table + key // PAGE)
                read = (w < USED)[None, :]
            else:
                block = tl.load(table + key // PAGE, mask=key < paged_end, other=0)
                read = (key < paged_end)[:, None] & (w < USED)[None, :]
            place = head_base + (block.to(tl.int64) * block_stride + (key % PAGE) * cell_stride)[:, None] + w[None, :]
            if MASKED == 0 and USED == WIDTH:
                k_tile = tl.load(place)
                v_tile = tl.load(place + value_stride)
            else:
                k_tile = tl.load(place, mask=read, other=0)
                v_tile = tl.load(place + value_stride, mask=read, other=0)
            if FORM == 0:
                scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            else:
                k_even, k_odd = widen(k_tile, FORM, MEANS)
                scores = tl.dot(q_even, tl.trans(k_even))
                scores = tl.dot(q_odd, tl.trans(k_odd), scores)
            visible = (key[None, :] < paged_end) & (key[None, :] <= (past + last)[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] >= first_visible(position, WINDOW, CHUNKED)[:, None])
            distance = key[None, :] - position[:, None]
            if BRANCHES:
                visible = visible & seen(words[:, None], -distance)
            weights, decay, peak, total = _weigh(
                scores, visible, distance, slope, peak, total, paged_scale, soft_cap, CAPPED, HAS_SLOPES, MASKED
            )
            if FORM == 0:
                acc = acc * decay[:, None]
                acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
            else:
                v_even, v_odd = widen(v_tile, FORM, MEANS)
                acc_even = tl.dot(weights.to(tl.float16), v_even, acc_even * decay[:, None])
                acc_odd = tl.dot(weights.to(tl.float16), v_odd, acc_odd * decay[:, None])
    if FORM > 0:  # noqa: SIM102 (the compiler decides this one)
        if paged_end > begin:
            acc = tl.interleave(acc_even, acc_odd) * value_unit

    if HAS_FRESH:
        fresh_begin = tl.maximum(begin - past, 0)
        fresh_end = end - past
        fresh_seen = tl.maximum(visible_end - past, 0) // BLOCK_N * BLOCK_N
        fresh_base = fresh + start.to(tl.int64) * q_token_stride + kv_head * D
        for MASKED in tl.static_range(2):
            phase_begin = fresh_begin if MASKED == 0 else tl.maximum(fresh_begin, fresh_seen)
            for first in range(phase_begin, fresh_seen if MASKED == 0 else fresh_end, BLOCK_N):
                key = first + tl.arange(0, BLOCK_N)
                place = fresh_base + (key * q_token_stride)[:, None] + d[None, :]
                if MASKED == 0 and BULK:
                    k_tile = fresh_tiles.load([start + first, kv_head * D])
                    v_tile = fresh_tiles.load([start + first, (KV_HEADS + kv_head) * D])
                elif MASKED == 0 and D == BLOCK_D:
                    k_tile = tl.load(place)
                    v_tile = tl.load(place + KV_HEADS * D)
                else:
                    read = (d < D)[None, :] if MASKED == 0 else (key < fresh_end)[:, None] & (d < D)[None, :]
                    k_tile = tl.load(place, mask=read, other=0.0)
                    v_tile = tl.load(place + KV_HEADS * D, mask=read, other=0.0)
                scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                visible = key[None, :] <= last[:, None]
                if WINDOW > 0:
                    visible = visible & (past + key[None, :] >= first_visible(position, WINDOW, CHUNKED)[:, None])
                distance = key[None, :] - query[:, None]
                if BRANCHES:
                    visible = visible & seen(words[:, None], -distance)
                weights, decay, peak, total = _weigh(
                    scores, visible, distance, slope, peak, total, scale, soft_cap, CAPPED, HAS_SLOPES, MASKED
                )
                acc = acc * decay[:, None]
                acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out + (token * heads + head)[:, None] * D + d[None, :]
    if ROUNDED:
        tl.store(target, narrow_by(acc.to(q.dtype.element_ty).to(tl.float32), inverse), mask=valid)
    else:
        tl.store(target, acc.to(out.dtype.element_ty), mask=valid)
