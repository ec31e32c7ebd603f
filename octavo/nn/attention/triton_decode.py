"""Attention of few queries per row over a paged context, on a GPU: decoding, and verification of drafts.

The query heads that share a kv head, times the row's queries, are the rows of one tile, so that each key is read once.
A context is split over several programs if rows alone would not fill the GPU; a second kernel merges the parts by
their log-sum-exp (Dao et al. 2023, "Flash-Decoding", https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
If contexts begin with the same blocks, a tile holds the queries of many rows, so that the common prefix is read once
for all of them, and each row reads only the rest (Juravsky et al. 2024, "Hydragen",
https://arxiv.org/abs/2402.05099).
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.attention.triton_fp8 import narrow_by, unit, widen
from octavo.nn.ops.triton_overlap import follow, invite, join, lead

WHOLE: tl.constexpr = tl.constexpr(0)
REST: tl.constexpr = tl.constexpr(1)
COMMON: tl.constexpr = tl.constexpr(2)
PLANNED: tl.constexpr = tl.constexpr(3)
"""What a launch reads: whole contexts, the rest after each row's common prefix, common prefixes, or parts of contexts
of about equal length."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first position in the window of a query, as `AttentionSpec.first_visible`."""
    if CHUNKED:
        return position // WINDOW * WINDOW
    else:
        return position - WINDOW + 1


@triton.jit
def adjusted(scores, distance, soft_cap, slope, CAPPED: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Return scores, which include the factor log2(e) for exp2, after the soft cap and the linear bias.

    Args:
        distance: the keys' positions less those of the queries.
    """
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / soft_cap) * LOG2_E) + 1.0))
        scores = scores * LOG2_E
    if HAS_SLOPES:
        scores = scores + slope * distance
    return scores


@triton.jit
def seen(unseen, back):
    """Return whether queries attend to keys `back` places before them, as `seen` of `base.py`. They broadcast."""
    return (unseen >> tl.minimum(tl.maximum(back, 0), 31)) & 1 == 0


@triton.jit
def seen_end(first, unseen, query):
    """Return the end of the keys that all these queries attend to. Only a row's piece has any that are on other paths
    before its first query.

    Args:
        first: the first query's place in the cache.
        query: how many places each query is behind it.
    """
    earlier = tl.max(unseen >> tl.minimum(query, 31), 0) > 0
    return tl.where(earlier, tl.maximum(first - 30, 0), first + 1)


@triton.jit(do_not_specialize=["splits", "parts", "first_part"])
def decode_kernel(
    q,
    cache,
    cache_scales,
    out,
    inverse,
    part_out,
    part_lse,
    rows,
    shared,
    query_start,
    seq_lens,
    table_rows,
    tables,
    scale,
    soft_cap,
    sinks,
    slopes,
    unseen,
    q_token_stride,
    q_head_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    table_stride,
    splits,
    parts,
    first_part,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MERGED: tl.constexpr,
    QUERIES: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BRANCHES: tl.constexpr,
    DIVIDED: tl.constexpr,
    READS: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
    FORM: tl.constexpr,
    MEANS: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend with one kv head of one row to one part of its context. `scale` is the softmax scale times log2(e).

    The `splits` parts of a launch are parts `first_part` onwards of all `parts`. If READS is COMMON, an item is a group
    of rows with one query each, three integers in `shared`: their start in `rows`, their number, and the length of
    their common prefix in tokens, a multiple of a tile. REST is launched afterwards and runs concurrently: a row's
    context begins at shared[row], and unless it is DIVIDED, all `parts` are of the common prefix.

    If READS is PLANNED, `shared` is the plan (`triton_plan.py`), and not DIVIDED: the program of a row's last part to
    end merges all parts, MERGED at a time. GROUPS is a power of two, at least GROUP.

    An FP8 cache (FORM, `triton_fp8.py`) is given as 16-bit words, with strides in words, and computed in float16: q,
    output and accumulators are two tiles each, of the even and of the odd channels.

    With BRANCHES, not for COMMON, `unseen` is that of the step.

    ROUNDED outputs, only if not DIVIDED, are the bits of E4M3: of what would be stored, times the number at `inverse`.
    """
    if READS == COMMON:
        lead(OVERLAPS)
    elif READS == REST:
        invite(OVERLAPS)
    else:
        follow(OVERLAPS)
    kv_head = tl.program_id(0)
    item, split = tl.program_id(1), tl.program_id(2)
    if READS == COMMON:
        item, split = split, item  # unused groups come last
    slots = tl.num_programs(1)
    if READS == PLANNED:
        slot = item
        item = tl.load(shared + 4 * slot)
        if item < 0:
            return
        split = tl.load(shared + 4 * slot + 1)
        splits = tl.load(shared + 4 * slot + 2)
        first_part = tl.load(shared + 4 * slot + 3)
    heads = tl.num_programs(0) * GROUP
    m = tl.arange(0, M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    row = item
    if READS == COMMON:
        begin_of = rows + tl.load(shared + 3 * item)
        count = tl.load(shared + 3 * item + 1)
        seq_len = tl.load(shared + 3 * item + 2)
        row = tl.load(begin_of)
        row_of = tl.load(begin_of + query, mask=query < count, other=0)
        place = row_of
        token = tl.load(query_start + row_of).to(tl.int64)
    else:
        if HAS_ROWS:
            row = tl.load(rows + item)
        start = tl.load(query_start + row)
        count = tl.load(query_start + row + 1) - start
        seq_len = tl.load(seq_lens + row)
        place = item * QUERIES + query
        token = (start + query).to(tl.int64)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows + row)
    table = tables + table_row.to(tl.int64) * table_stride
    WIDTH: tl.constexpr = BLOCK_D if FORM == 0 else BLOCK_D // 2
    USED: tl.constexpr = D if FORM == 0 else D // 2
    d = tl.arange(0, WIDTH)
    m_valid = query < count
    md_valid = m_valid[:, None] & (d < USED)[None, :]
    q_place = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride
    value_unit = 1.0
    if FORM == 0:
        q_tile = tl.load(q_place + d[None, :], mask=md_valid, other=0.0)
    else:
        # A sixteenth keeps queries of any model within float16.
        q_even = (tl.load(q_place + 2 * d[None, :], mask=md_valid, other=0.0) * 0.0625).to(tl.float16)
        q_odd = (tl.load(q_place + 2 * d[None, :] + 1, mask=md_valid, other=0.0) * 0.0625).to(tl.float16)
        scale = scale * 16.0 * unit(FORM, MEANS) * tl.load(cache_scales + kv_head)
        value_unit = unit(FORM, MEANS) * tl.load(cache_scales + tl.num_programs(0) + kv_head)
    position = seq_len - count + query
    if BRANCHES:
        words = tl.load(unseen + token, mask=m_valid, other=0)

    first = 0
    if READS == REST:
        first = tl.load(shared + row) // BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(first_visible(seq_len - count, WINDOW, CHUNKED), 0) // BLOCK_N
    last = tl.cdiv(seq_len, BLOCK_N)
    share = tl.cdiv(last - first, splits)
    begin = first + split * share
    end = tl.minimum(begin + share, last)

    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    acc_odd = tl.zeros([M, WIDTH], tl.float32)
    if HAS_SINKS and READS != COMMON:
        # The sink is in the first part only.
        peak = tl.where(split == 0, tl.load(sinks + head) * LOG2_E, float("-inf"))
        total = tl.where(split == 0, 1.0, total)
    slope = tl.zeros([M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head) * LOG2_E
    head_base = cache + kv_head.to(tl.int64) * kv_head_stride
    # Tiles that are fully visible to every query come first and need no masks. ONE_LOOP masks all: a program with few
    # tiles takes longer to run through both loops than to mask.
    plain_end = begin
    if READS == COMMON:
        plain_end = end
    elif WINDOW == 0 and not ONE_LOOP:
        visible_end = seq_len - count + 1
        if BRANCHES:
            visible_end = seen_end(seq_len - count, words, query)
        plain_end = tl.maximum(begin, tl.minimum(end, visible_end // BLOCK_N))
    for MASKED in tl.static_range(1 if ONE_LOOP and READS != COMMON else 0, 1 if READS == COMMON else 2):
        for tile in range(begin if MASKED == 0 else plain_end, plain_end if MASKED == 0 else end):
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if MASKED == 0:
                block = tl.load(table + key // PAGE)
                read = (d < USED)[None, :]
            else:
                block = tl.load(table + key // PAGE, mask=key < seq_len, other=0)
                read = (key < seq_len)[:, None] & (d < USED)[None, :]
            cells = head_base + (block.to(tl.int64) * block_stride + (key % PAGE) * cell_stride)[:, None] + d[None, :]
            if MASKED == 0 and USED == WIDTH:
                k_tile = tl.load(cells)
                v_tile = tl.load(cells + value_stride)
            else:
                k_tile = tl.load(cells, mask=read, other=0)
                v_tile = tl.load(cells + value_stride, mask=read, other=0)
            if FORM == 0:
                scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
            else:
                k_even, k_odd = widen(k_tile, FORM, MEANS)
                scores = tl.dot(q_even, tl.trans(k_even))
                scores = tl.dot(q_odd, tl.trans(k_odd), scores) * scale
            distance = key[None, :] - position[:, None]
            scores = adjusted(scores, distance, soft_cap, slope[:, None], CAPPED, HAS_SLOPES)
            if MASKED == 1:
                visible = key[None, :] <= position[:, None]
                if WINDOW > 0:
                    visible = visible & (key[None, :] >= first_visible(position, WINDOW, CHUNKED)[:, None])
                if BRANCHES:
                    visible = visible & seen(words[:, None], -distance)
                scores = tl.where(visible, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            safe = new_peak if MASKED == 0 else tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - safe[:, None])
            decay = tl.exp2(peak - safe)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            if FORM == 0:
                acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
            else:
                v_even, v_odd = widen(v_tile, FORM, MEANS)
                acc_odd = acc_odd * decay[:, None]
                acc = tl.dot(weights.to(tl.float16), v_even, acc)
                acc_odd = tl.dot(weights.to(tl.float16), v_odd, acc_odd)
            peak = new_peak

    cell = place.to(tl.int64) * heads + head
    STEP: tl.constexpr = 1 if FORM == 0 else 2
    if READS == REST:
        join(OVERLAPS)
        if not DIVIDED:
            for common in range(parts):
                lse = tl.load(part_lse + cell * parts + common, mask=m_valid, other=float("-inf"))
                new_peak = tl.maximum(peak, lse)
                safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                weight, decay = tl.exp2(lse - safe), tl.exp2(peak - safe)
                total = total * decay + weight
                found = part_out + (cell * parts + common)[:, None] * D + STEP * d[None, :]
                held = md_valid & (lse > float("-inf"))[:, None]
                weight = weight / value_unit
                acc = acc * decay[:, None] + weight[:, None] * tl.load(found, mask=held, other=0.0)
                if STEP == 2:
                    acc_odd = acc_odd * decay[:, None] + weight[:, None] * tl.load(found + 1, mask=held, other=0.0)
                peak = new_peak
    if READS == PLANNED and splits > 1:
        # Parts of all divided rows are numbered one after the other, and have all heads.
        at = ((first_part + split).to(tl.int64) * QUERIES + query) * heads + head
        _store_part(peak, total, acc, acc_odd, part_out, part_lse, at, d, m_valid, md_valid, value_unit, D, STEP)
        tl.debug_barrier()
        ended = shared + 4 * slots + item * tl.num_programs(0) + kv_head
        if tl.atomic_add(ended, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(ended, 0)  # for the next layer
        if QUERIES > 8:  # noqa: SIM102 (the compiler decides this one)
            if splits <= count:
                place_of_row = (first_part.to(tl.int64) * QUERIES + query) * heads + head
                mixed = merged_rows(part_out, part_lse, place_of_row, QUERIES * heads, splits, m_valid, M, D, BLOCK_D)
                c = tl.arange(0, BLOCK_D)
                target = out + (token * heads + head)[:, None] * D + c[None, :]
                _store(target, mixed, m_valid[:, None] & (c < D)[None, :], q, inverse, ROUNDED)
                count = count * 0
        g, channel = tl.arange(0, GROUPS), tl.arange(0, BLOCK_D)
        mine = (g < GROUP)[:, None] & (channel < D)[None, :]
        for i in range(count):
            place_of = (first_part.to(tl.int64) * QUERIES + i) * heads + kv_head * GROUP
            mixed = merged(part_out, part_lse, place_of, QUERIES * heads, splits, GROUP, GROUPS, D, BLOCK_D, MERGED)
            target = out + ((start + i).to(tl.int64) * heads + kv_head * GROUP + g)[:, None] * D + channel[None, :]
            _store(target, mixed, mine, q, inverse, ROUNDED)
        return

    if DIVIDED:
        at = cell * parts + first_part + split
        _store_part(peak, total, acc, acc_odd, part_out, part_lse, at, d, m_valid, md_valid, value_unit, D, STEP)
    else:
        share_of_whole = (value_unit / tl.where(total > 0, total, 1.0))[:, None]
        for odd in tl.static_range(STEP):
            target = out + (token * heads + head)[:, None] * D + STEP * d[None, :] + odd
            _store(target, (acc if odd == 0 else acc_odd) * share_of_whole, md_valid, q, inverse, ROUNDED)


@triton.jit
def _store(target, values, mask, q, inverse, ROUNDED: tl.constexpr):
    """Store outputs; only the dtype of `q` is used."""
    if ROUNDED:
        tl.store(target, narrow_by(values.to(q.dtype.element_ty).to(tl.float32), inverse), mask=mask)
    else:
        tl.store(target, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    peak,
    total,
    acc,
    acc_odd,
    part_out,
    part_lse,
    at,
    d,
    m_valid,
    md_valid,
    value_unit,
    D: tl.constexpr,
    STEP: tl.constexpr,
):
    """Store a part's outputs and log-sum-exps at [M] places `at`."""
    whole = tl.where(total > 0, total, 1.0)
    held = md_valid & (total > 0)[:, None]
    for odd in tl.static_range(STEP):
        result = (acc if odd == 0 else acc_odd) * (value_unit / whole)[:, None]
        tl.store(part_out + at[:, None] * D + STEP * d[None, :] + odd, result, mask=held)
    lse = tl.where(total > 0, peak + tl.log2(whole), float("-inf"))
    tl.store(part_lse + at, lse, mask=m_valid)


@triton.jit
def merged(
    part_out,
    part_lse,
    first,
    heads,
    parts,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge the `parts` of one query for GROUP heads, MERGED parts at a time; return [GROUPS, BLOCK_D].

    Args:
        first: index of the first part's first head in `part_lse`.
        heads: from a head to the same one of the next part.
    """
    part, g, channel = tl.arange(0, MERGED), tl.arange(0, GROUPS), tl.arange(0, BLOCK_D)
    peak = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    acc = tl.zeros([GROUPS, BLOCK_D], tl.float32)
    for begin in range(0, parts, MERGED):
        at = first + (begin + part)[:, None] * heads + g[None, :]
        valid = (begin + part < parts)[:, None] & (g < GROUP)[None, :]
        lse = tl.load(part_lse + at, mask=valid, other=float("-inf"), cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight, decay = tl.exp2(lse - safe[None, :]), tl.exp2(peak - safe)
        held = (lse > float("-inf"))[:, :, None] & (channel < D)[None, None, :]
        found = part_out + at[:, :, None] * D + channel[None, None, :]
        values = tl.load(found, mask=held, other=0.0, cache_modifier=".cg")
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay[:, None] + tl.sum(values * weight[:, :, None], 0)
        peak = new_peak
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def merged_rows(part_out, part_lse, first, step, parts, valid, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Merge the `parts` of M rows one after the other, which takes less than row by row if there are few; return [M,
    BLOCK_D].

    Args:
        first: [M] indices of the first parts in `part_lse`.
        step: from a part to the next.
        valid: [M], rows that there are.
    """
    channel = tl.arange(0, BLOCK_D)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    for part in range(parts):
        at = first + part * step
        lse = tl.load(part_lse + at, mask=valid, other=float("-inf"), cache_modifier=".cg")
        new_peak = tl.maximum(peak, lse)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight, decay = tl.exp2(lse - safe), tl.exp2(peak - safe)
        held = (lse > float("-inf"))[:, None] & (channel < D)[None, :]
        found = part_out + at[:, None] * D + channel[None, :]
        values = tl.load(found, mask=held, other=0.0, cache_modifier=".cg")
        total = total * decay + weight
        acc = acc * decay[:, None] + values * weight[:, None]
        peak = new_peak
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["count"])
def merge_kernel(
    part_out,
    part_lse,
    out,
    q,
    inverse,
    rows,
    query_start,
    count,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Merge one head of one query: the outputs of `count` parts, weighted by exp2 of their log-sum-exps. ROUNDED:
    see `decode_kernel`. Only the dtype of `q` is used."""
    follow(OVERLAPS)
    head = tl.program_id(0)
    item = tl.program_id(1) // QUERIES
    query = tl.program_id(1) % QUERIES
    heads = tl.num_programs(0)
    row = item
    if HAS_ROWS:
        row = tl.load(rows + item)
    start = tl.load(query_start + row)
    if query < tl.load(query_start + row + 1) - start:
        part = tl.arange(0, BLOCK_P)
        d = tl.arange(0, BLOCK_D)
        cell = tl.program_id(1).to(tl.int64) * heads + head
        lse = tl.load(part_lse + cell * count + part, mask=part < count, other=float("-inf"))
        peak = tl.max(lse, 0)
        weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
        held = (lse > float("-inf"))[:, None] & (d < D)[None, :]
        parts = tl.load(part_out + (cell * count + part)[:, None] * D + d[None, :], mask=held, other=0.0)
        total = tl.sum(weight, 0)
        mixed = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        target = out + ((start + query).to(tl.int64) * heads + head) * D + d
        if ROUNDED:
            tl.store(target, narrow_by(mixed.to(q.dtype.element_ty).to(tl.float32), inverse), mask=d < D)
        else:
            tl.store(target, mixed.to(out.dtype.element_ty), mask=d < D)
