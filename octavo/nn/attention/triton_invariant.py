"""Kernels of `invariant.py`: attention whose sums have one order, whatever else is computed with them.

A context is divided into parts of PART keys, counted from its beginning. Within a part, tiles of keys are added one
after another (online softmax, arXiv:1805.02867), and parts are added one after another. So a query's result depends on
its own context only: not on the queries of its tile, nor on who computes which part.

The sum of the weights is a product of the matrix units, as that with the values is, since its order is the same in
tiles of all sizes; a reduction's order is not. Multiplications and additions are not fused, since compilers may fuse
those of one kernel and not those of another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.attention.triton_decode import LOG2_E, adjusted, first_visible


@triton.jit
def attend_kernel(
    q,
    cache,
    out,
    part_out,
    part_peak,
    part_total,
    tiles,
    rows,
    query_start,
    seq_lens,
    table_rows,
    tables,
    scale,
    soft_cap,
    sinks,
    slopes,
    ahead,
    most_parts,
    q_token_stride,
    q_head_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    table_stride,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    AHEAD: tl.constexpr,
    TILED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend with the query heads of one kv head, QUERIES queries of a row. Grid: kv heads, items, splits.

    An item is a tile, (row, first query in the row), if TILED, else a row of `rows` or of the step, from its first
    query on. With SPLIT, the results of parts are stored, [items * QUERIES, heads, most_parts(, D)], for
    `merge_kernel`.
    """
    kv_head, item, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0) * GROUP
    first_query = 0
    row = item
    if TILED:
        row = tl.load(tiles + 2 * item)
        first_query = tl.load(tiles + 2 * item + 1)
    elif HAS_ROWS:
        row = tl.load(rows + item)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows + row)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    past = seq_len - count
    table = tables + table_row.to(tl.int64) * table_stride

    m = tl.arange(0, BLOCK_M)
    query, member = first_query + m // BLOCK_G, m % BLOCK_G
    head = kv_head * GROUP + member
    used = (query < count) & (query < first_query + QUERIES) & (member < GROUP)
    d = tl.arange(0, BLOCK_D)
    valid = used[:, None] & (d < D)[None, :]
    token = (start + query).to(tl.int64)
    q_tile = tl.load(q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :], valid, other=0.0)
    position = past + query
    last = position
    end = tl.minimum(seq_len, past + first_query + QUERIES)
    if AHEAD:
        last = position + tl.load(ahead + token, mask=used, other=0)
        end = tl.max(tl.where(used, last + 1, 0), 0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_visible(past + first_query, WINDOW, CHUNKED), 0) // BLOCK_N * BLOCK_N

    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=used, other=0.0) * LOG2_E
    base = cache + kv_head.to(tl.int64) * kv_head_stride
    ones = tl.full([BLOCK_N, 16], 1.0, q_tile.dtype)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_part = begin // PART
    for part in range(first_part + split, tl.cdiv(end, PART), tl.num_programs(2)):
        own_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        own_total = tl.zeros([BLOCK_M, 16], tl.float32)
        own = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for first in range(tl.maximum(part * PART, begin), tl.minimum(part * PART + PART, end), BLOCK_N):
            key = first + tl.arange(0, BLOCK_N)
            block = tl.load(table + key // PAGE, mask=key < end, other=0)
            place = base + (block.to(tl.int64) * block_stride + (key % PAGE) * cell_stride)[:, None] + d[None, :]
            there = (key < end)[:, None] & (d < D)[None, :]
            k_tile = tl.load(place, mask=there, other=0.0)
            v_tile = tl.load(place + value_stride, mask=there, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile)) * scale
            distance = key[None, :] - position[:, None]
            scores = adjusted(scores, distance, soft_cap, slope[:, None], CAPPED, HAS_SLOPES)
            visible = key[None, :] <= last[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] >= first_visible(position, WINDOW, CHUNKED)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            top = tl.maximum(own_peak, tl.max(scores, 1))
            safe = tl.where(top == float("-inf"), 0.0, top)
            decay = tl.exp2(own_peak - safe)[:, None]
            weights = tl.exp2(scores - safe[:, None]).to(v_tile.dtype)
            own_total = tl.dot(weights, ones, own_total * decay)
            own = tl.dot(weights, v_tile, own * decay)
            own_peak = top
        of_part = tl.max(own_total, 1)  # sixteen times the same
        if SPLIT:
            cell = ((item * QUERIES + m // BLOCK_G).to(tl.int64) * heads + head) * most_parts + part - first_part
            tl.store(part_out + cell[:, None] * D + d[None, :], own, mask=valid)
            tl.store(part_peak + cell, own_peak, mask=used)
            tl.store(part_total + cell, of_part, mask=used)
        else:
            top = tl.maximum(peak, own_peak)
            safe = tl.where(top == float("-inf"), 0.0, top)
            before, more = tl.exp2(peak - safe), tl.exp2(own_peak - safe)
            total = total * before + of_part * more
            acc = acc * before[:, None] + own * more[:, None]
            peak = top
    if not SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0) * LOG2_E
            top = tl.maximum(peak, sink)
            before = tl.exp2(peak - top)
            total = total * before + tl.exp2(sink - top)
            acc = acc * before[:, None]
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (token * heads)[:, None] * D + head[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), valid
        )


@triton.jit
def merge_kernel(
    out,
    part_out,
    part_peak,
    part_total,
    rows,
    query_start,
    seq_lens,
    sinks,
    most_parts,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Add the parts of one query head, as `attend_kernel` does without SPLIT. Grid: items * QUERIES, heads."""
    cell_row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = cell_row // QUERIES
    if HAS_ROWS:
        row = tl.load(rows + row)
    query = cell_row % QUERIES
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    past = seq_len - count
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_visible(past, WINDOW, CHUNKED), 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(seq_len, past + QUERIES)
    d = tl.arange(0, BLOCK_D)
    valid = (query < count) & (d < D)
    cell = (cell_row.to(tl.int64) * heads + head) * most_parts
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for part in range(tl.cdiv(end, PART) - begin // PART):
        own_peak = tl.load(part_peak + cell + part, mask=query < count, other=float("-inf"))
        own_total = tl.load(part_total + cell + part, mask=query < count, other=0.0)
        own = tl.load(part_out + (cell + part) * D + d, mask=valid, other=0.0)
        top = tl.maximum(peak, own_peak)
        safe = tl.where(top == float("-inf"), 0.0, top)
        before, more = tl.exp2(peak - safe), tl.exp2(own_peak - safe)
        total = total * before + own_total * more
        acc = acc * before + own * more
        peak = top
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        top = tl.maximum(peak, sink)
        before = tl.exp2(peak - top)
        total = total * before + tl.exp2(sink - top)
        acc = acc * before
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + ((start + query).to(tl.int64) * heads + head) * D + d, acc.to(out.dtype.element_ty), mask=valid)
