"""Absorbed latent attention over a paged context, on a GPU: decoding, verification of drafts, short chunks of prompts.

All heads share the latents, so some heads times some queries of a row are the rows of one tile, and a latent is loaded
once for all of them, as key and as value. A context is split over several programs if rows alone would not fill the
GPU; `merge_kernel` of `nn/attention/triton_decode.py` merges the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow


@triton.jit(do_not_specialize=["splits"])
def absorbed_kernel(
    q_low,
    q,
    cache,
    out,
    part_out,
    part_lse,
    plan,
    items,
    query_start,
    seq_lens,
    table_rows,
    tables,
    scale,
    low_head_stride,
    low_token_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    cell_stride,
    table_stride,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    NOPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    DIVIDED: tl.constexpr,
    PLANNED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_TILES: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend with GROUP heads of up to QUERIES queries of one row to one part of its context.

    `q_low` [HEADS, T, RANK]: queries times the heads' key matrices; the rotated channels are read from q
    [T, HEADS, NOPE + ROPE]. `items`: rows (HAS_ROWS), or pairs of a row and the first query in it (HAS_TILES). `scale`
    is the softmax scale times log2(e). The result, [T, HEADS, RANK], is a sum of latents.

    If PLANNED, an item is a slot of `plan` (`triton_plan.py`), QUERIES is 1, and parts of all divided rows are numbered
    one after the other: outputs [parts, HEADS, RANK].
    """
    follow(OVERLAPS)
    item, split = tl.program_id(1), tl.program_id(2)
    first_part = 0
    if PLANNED:
        slot = plan + 4 * item
        item = tl.load(slot)
        if item < 0:
            return
        split = tl.load(slot + 1)
        splits = tl.load(slot + 2)
        first_part = tl.load(slot + 3)
    m = tl.arange(0, M)
    query = m // GROUP
    head = tl.program_id(0) * GROUP + m % GROUP
    row = item
    first_query = 0
    if HAS_TILES:
        row = tl.load(items + 2 * item)
        first_query = tl.load(items + 2 * item + 1)
    elif HAS_ROWS:
        row = tl.load(items + item)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows + row)
    table = tables + table_row.to(tl.int64) * table_stride
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    past = tl.load(seq_lens + row) - count
    here = tl.minimum(count - first_query, QUERIES)
    # A row without queries is padding.
    end_key = tl.where(here > 0, past + first_query + here, 0)
    token = (start + first_query + query).to(tl.int64)
    position = past + first_query + query

    c = tl.arange(0, BLOCK_RANK)
    r = tl.arange(0, BLOCK_ROPE)
    m_valid = (query < here) & (head < HEADS)
    low_place = q_low + head.to(tl.int64)[:, None] * low_head_stride + token[:, None] * low_token_stride + c[None, :]
    low_tile = tl.load(low_place, mask=m_valid[:, None] & (c < RANK)[None, :], other=0.0)
    rope_place = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + NOPE + r[None, :]
    rope_tile = tl.load(rope_place, mask=m_valid[:, None] & (r < ROPE)[None, :], other=0.0)

    last = tl.cdiv(end_key, BLOCK_N)
    share = tl.cdiv(last, splits)
    begin = split * share
    end = tl.minimum(begin + share, last)
    # Tiles that are visible to every query come first and need no masks.
    plain_end = tl.maximum(begin, tl.minimum(end, (past + first_query + 1) // BLOCK_N))

    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_RANK], tl.float32)
    for MASKED in tl.static_range(2):
        for tile in range(begin if MASKED == 0 else plain_end, plain_end if MASKED == 0 else end):
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if MASKED == 0:
                block = tl.load(table + key // PAGE)
            else:
                block = tl.load(table + key // PAGE, mask=key < end_key, other=0)
            cells = cache + (block.to(tl.int64) * block_stride + (key % PAGE) * cell_stride)[:, None]
            if MASKED == 0 and RANK == BLOCK_RANK and ROPE == BLOCK_ROPE:
                low = tl.load(cells + c[None, :])
                turned = tl.load(cells + RANK + r[None, :])
            else:
                # Cells that no token owns may hold anything, NaN included.
                read = (key < end_key)[:, None]
                low = tl.load(cells + c[None, :], mask=read & (c < RANK)[None, :], other=0.0)
                turned = tl.load(cells + RANK + r[None, :], mask=read & (r < ROPE)[None, :], other=0.0)
            scores = tl.dot(low_tile, tl.trans(low), input_precision="ieee")
            scores = tl.dot(rope_tile, tl.trans(turned), scores, input_precision="ieee") * scale
            if MASKED == 1:
                scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            safe = new_peak if MASKED == 0 else tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - safe[:, None])
            decay = tl.exp2(peak - safe)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(low.dtype), low, acc * decay[:, None], input_precision="ieee")
            peak = new_peak

    whole = tl.where(total > 0, total, 1.0)
    result = acc / whole[:, None]
    valid = m_valid[:, None] & (c < RANK)[None, :]
    if DIVIDED or (PLANNED and splits > 1):
        if PLANNED:
            part = (first_part + split).to(tl.int64) * HEADS + head
        else:
            part = ((item * QUERIES + query).to(tl.int64) * HEADS + head) * splits + split
        tl.store(part_out + part[:, None] * RANK + c[None, :], result, mask=valid & (total > 0)[:, None])
        tl.store(part_lse + part, tl.where(total > 0, peak + tl.log2(whole), float("-inf")), mask=m_valid)
    else:
        target = out + (token * HEADS + head)[:, None] * RANK + c[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=valid)
