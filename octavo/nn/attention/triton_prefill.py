"""Attention of many queries a row over a paged context, on a GPU (Dao 2023, https://arxiv.org/abs/2307.08691).

A batch is a list of tiles, each some consecutive queries of one row, so that rows of all lengths share one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_tiles(
    begin,
    end,
    q_tile,
    peak,
    total,
    acc,
    head_base,
    table,
    position,
    seq_len,
    scale,
    soft_cap,
    block_stride,
    value_stride,
    cell_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes the keys of [begin, end) into the running peak, total and output; unmasked ones are seen by all queries."""
    d = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = key < seq_len
            block = tl.load(table + key // PAGE, mask=inside, other=0)
        else:
            block = tl.load(table + key // PAGE)
        cell = block.to(tl.int64) * block_stride + (key % PAGE) * cell_stride
        source = head_base + cell[:, None] + d[None, :]
        if MASKED:
            valid = inside[:, None] & (d < D)[None, :]
            k_tile = tl.load(source, mask=valid, other=0.0)
            v_tile = tl.load(source + value_stride, mask=valid, other=0.0)
        elif D == BLOCK_D:
            k_tile = tl.load(source)
            v_tile = tl.load(source + value_stride)
        else:
            k_tile = tl.load(source, mask=(d < D)[None, :], other=0.0)
            v_tile = tl.load(source + value_stride, mask=(d < D)[None, :], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if CAPPED:
            scores = scores * scale
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / soft_cap) * 1.4426950408889634) + 1.0))
            scores = scores * (1.4426950408889634 / scale)
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            safe = new_peak
        # One fused multiply-add an element: the scale is applied here and not to the scores.
        weights = tl.exp2(scores * scale - safe[:, None])
        decay = tl.exp2(peak - safe)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit
def prefill_kernel(
    q,
    cache,
    out,
    tiles,
    query_start,
    seq_lens,
    table_rows,
    tables,
    scale,
    soft_cap,
    q_token_stride,
    q_head_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    table_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
):
    """One query head of one tile. `tiles` holds (row, first query within the row) pairs."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
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
    q_tile = tl.load(q + token[:, None] * q_token_stride + head * q_head_stride + d[None, :], mask=valid, other=0.0)
    position = seq_len - count + query

    first_position = seq_len - count + first_query
    end = tl.minimum(seq_len, first_position + BLOCK_M)
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    head_base = cache + (head // GROUP).to(tl.int64) * kv_head_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = 0
    if WINDOW > 0:
        seen_by_all = 0
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        peak, total, acc = _attend_tiles(
            0,
            seen_by_all,
            q_tile,
            peak,
            total,
            acc,
            head_base,
            table,
            position,
            seq_len,
            scale,
            soft_cap,
            block_stride,
            value_stride,
            cell_stride,
            D,
            BLOCK_D,
            BLOCK_N,
            PAGE,
            WINDOW,
            CAPPED,
            False,
        )
        begin = seen_by_all
    peak, total, acc = _attend_tiles(
        begin,
        end,
        q_tile,
        peak,
        total,
        acc,
        head_base,
        table,
        position,
        seq_len,
        scale,
        soft_cap,
        block_stride,
        value_stride,
        cell_stride,
        D,
        BLOCK_D,
        BLOCK_N,
        PAGE,
        WINDOW,
        CAPPED,
        True,
    )
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out + (token * heads + head)[:, None] * D + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=valid)
