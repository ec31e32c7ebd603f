"""Decoding of few rows on a GPU in one launch: norms and rotation of heads, storing, attention, and merging.

With few rows, each launch takes longer to begin and end than to compute. So each program rotates its own queries, reads
its part of the context, and the last one of a head to end merges the parts. The step's own key and value are not read
from the cache: the program that has the last part takes them from the projection, and stores them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.fp8 import PLAIN, form_of
from octavo.nn.attention.triton_arguments import head_terms, scales_of
from octavo.nn.attention.triton_decode import LOG2_E, adjusted, first_visible
from octavo.nn.attention.triton_few import Few, num_splits
from octavo.nn.attention.triton_write import turned
from octavo.nn.ops.triton_overlap import invite, join, overlap
from octavo.nn.step import StepInput

MOST_HEADS = 8
"""Rows times kv heads of a launch. With more, programs fill the GPU without dividing contexts as far."""
_MOST_GROUP = 8
_KEYS, _WARPS = 32, 4
"""Of a tile, and of a program."""
_MERGED = 8192
"""Elements of parts that a program loads at once to merge them: 64 registers of a thread."""


@triton.jit
def _keys_of(
    tile,
    begin,
    end,
    table,
    head_base,
    block_stride,
    value_stride,
    cell_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Return a tile's positions, both halves of its keys, and its values; zeros outside [begin, end)."""
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (key >= begin) & (key < end)
    block = tl.load(table + key // PAGE, mask=inside, other=0)
    cells = head_base + (block.to(tl.int64) * block_stride + (key % PAGE) * cell_stride)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    d = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    half = inside[:, None] & (i < HALF)
    low = tl.load(cells + i, mask=half, other=0.0)
    high = tl.load(cells + HALF + i, mask=half, other=0.0)
    values = tl.load(cells + value_stride + d, mask=inside[:, None] & (d < 2 * HALF), other=0.0)
    return key, low, high, values


@triton.jit
def _add_tile(
    q_low,
    q_high,
    key,
    low,
    high,
    values,
    begin,
    end,
    peak,
    total,
    acc,
    scale,
    soft_cap,
    slope,
    CAPPED: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Return peak, sum and output after a tile of keys, of which those in [begin, end) count."""
    scores = tl.dot(q_low, tl.trans(low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(high), scores, input_precision="ieee") * scale
    scores = adjusted(scores, (key - end)[None, :], soft_cap, slope[:, None], CAPPED, HAS_SLOPES)
    scores = tl.where(((key >= begin) & (key < end))[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights, decay = tl.exp2(scores - safe[:, None]), tl.exp2(peak - safe)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_peak, total * decay + tl.sum(weights, 1), acc


@triton.jit
def _merge(
    part_out,
    part_lse,
    target,
    first_cell,
    count,
    splits,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Store the outputs of some heads from their `count` parts, which other programs may have written.

    All loads of a round are issued at once, and each thread adds up the parts of its own channels.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    gd_valid = (g < GROUP)[:, None] & (d < D)[None, :]
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(0, count, BLOCK_P):
        part = begin + tl.arange(0, BLOCK_P)
        cell = (first_cell + g)[None, :] * splits + part[:, None]
        valid = (part < count)[:, None] & (g < GROUP)[None, :]
        place = part_out + cell[:, :, None] * D + d[None, None, :]
        parts = tl.load(place, mask=valid[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg")
        lse = tl.load(part_lse + cell, mask=valid, other=float("-inf"), cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, decay = tl.exp2(lse - safe[None, :]), tl.exp2(peak - safe)
        total = total * decay + tl.sum(weights, 0)
        mixed = mixed * decay[:, None] + tl.sum(weights[:, :, None] * parts, 0)
        peak = new_peak
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(target + g[:, None] * D + d[None, :], mixed.to(target.dtype.element_ty), mask=gd_valid)


@triton.jit(do_not_specialize=["splits"])
def fused_decode_kernel(
    qkv,
    q_norm,
    k_norm,
    cos_sin,
    positions,
    slot_mapping,
    cache,
    out,
    part_out,
    part_lse,
    arrivals,
    query_start,
    seq_lens,
    table_rows,
    tables,
    eps,
    scale,
    soft_cap,
    sinks,
    slopes,
    token_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    table_stride,
    splits,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend with the query of one row and the heads of one kv head, to one of at most `splits` parts of the context.

    `scale` is the softmax scale times log2(e). Lengths, block tables and older keys are read before the previous launch
    has ended: they are written by earlier steps, or before the step's embedding, whose launch does not overlap others.

    Args:
        part_out, part_lse: [rows, heads, splits, 2 HALF] and [rows, heads, splits] float32, for parts of outputs and
            their log-sum-exps.
        arrivals: [rows, kv heads] int32, zeros before and after: programs that have stored their parts.
    """
    invite(OVERLAPS)
    D: tl.constexpr = 2 * HALF
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    start = tl.load(query_start + row)
    has_query = tl.load(query_start + row + 1) > start
    own = tl.load(seq_lens + row) - 1  # the query's position; -1 for a row of padding
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_visible(own, WINDOW, CHUNKED), 0)
    first = begin // BLOCK_N
    tiles = tl.cdiv(tl.maximum(own, 0), BLOCK_N) - first
    share = tl.maximum(tl.cdiv(tiles, splits), 1)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    from_tile = first + split * share
    to_tile = first + tl.minimum(split * share + share, tiles)
    table_row = row
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows + row)
    table = tables + table_row.to(tl.int64) * table_stride
    head_base = cache + kv_head.to(tl.int64) * kv_head_stride
    if split < active:  # others end at once, so that the next launch finds room; the first one always waits
        key, low, high, values = _keys_of(
            from_tile,
            begin,
            own,
            table,
            head_base,
            block_stride,
            value_stride,
            cell_stride,
            HALF,
            BLOCK_HALF,
            BLOCK_N,
            PAGE,
        )
        token = start.to(tl.int64)
        i = tl.arange(0, BLOCK_HALF)[None, :]
        position = tl.load(positions + token, mask=has_query, other=0)
        cos = tl.load(cos_sin + position * D + i, mask=i < HALF, other=0.0)
        sin = tl.load(cos_sin + position * D + HALF + i, mask=i < HALF, other=0.0)
        join(OVERLAPS)

        if has_query:
            kind = qkv.dtype.element_ty
            source = qkv + token * token_stride
            m = tl.arange(0, M)
            head = kv_head * GROUP + m % GROUP
            d = tl.arange(0, 2 * BLOCK_HALF)
            m_valid = m < GROUP
            q_low, q_high = turned(source + head[:, None] * D, m_valid[:, None], i, q_norm, cos, sin, eps, HALF, NORMED)
            q_low, q_high = q_low.to(kind), q_high.to(kind)

            heads = kv_heads * GROUP
            h = tl.zeros([1, 1], tl.int32) + kv_head
            k_low, k_high = turned(source + (heads + h) * D, h >= 0, i, k_norm, cos, sin, eps, HALF, NORMED)
            stored = cache.dtype.element_ty
            k_low, k_high = k_low.to(stored), k_high.to(stored)
            value = tl.load(source + (heads + kv_heads + kv_head) * D + d, mask=d < D, other=0.0).to(stored)

            peak = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, 2 * BLOCK_HALF], tl.float32)
            if HAS_SINKS:  # in the first part only
                peak = tl.where(split == 0, tl.load(sinks + head) * LOG2_E, float("-inf"))
                total = tl.where(split == 0, 1.0, total)
            slope = tl.zeros([M], tl.float32)
            if HAS_SLOPES:
                slope = tl.load(slopes + head) * LOG2_E
            peak, total, acc = _add_tile(
                q_low,
                q_high,
                key,
                low,
                high,
                values,
                begin,
                own,
                peak,
                total,
                acc,
                scale,
                soft_cap,
                slope,
                CAPPED,
                HAS_SLOPES,
            )
            for tile in range(from_tile + 1, to_tile):
                key, low, high, values = _keys_of(
                    tile,
                    begin,
                    own,
                    table,
                    head_base,
                    block_stride,
                    value_stride,
                    cell_stride,
                    HALF,
                    BLOCK_HALF,
                    BLOCK_N,
                    PAGE,
                )
                peak, total, acc = _add_tile(
                    q_low,
                    q_high,
                    key,
                    low,
                    high,
                    values,
                    begin,
                    own,
                    peak,
                    total,
                    acc,
                    scale,
                    soft_cap,
                    slope,
                    CAPPED,
                    HAS_SLOPES,
                )

            if (split == active - 1) & (own >= 0):
                score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32), 1)
                score = (score + tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32), 1)) * scale
                score = adjusted(score, 0, soft_cap, slope, CAPPED, HAS_SLOPES)
                new_peak = tl.maximum(peak, score)
                weight, decay = tl.exp2(score - new_peak), tl.exp2(peak - new_peak)
                total = total * decay + weight
                acc = acc * decay[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
                peak = new_peak
                slot = tl.load(slot_mapping + token)
                if slot >= 0:
                    cell = head_base + slot // PAGE * block_stride + slot % PAGE * cell_stride
                    tl.store(cell + i, k_low, mask=i < HALF)
                    tl.store(cell + HALF + i, k_high, mask=i < HALF)
                    tl.store(cell + value_stride + d, value, mask=d < D)

            whole = tl.where(total > 0, total, 1.0)
            result = acc * (1.0 / whole)[:, None]
            md_valid = m_valid[:, None] & (d < D)[None, :]
            first_head = kv_heads * GROUP * token + kv_head * GROUP
            if active == 1:
                target = out + (first_head + m)[:, None] * D + d[None, :]
                tl.store(target, result.to(out.dtype.element_ty), mask=md_valid)
            else:
                first_cell = (row * kv_heads + kv_head) * GROUP
                part = (first_cell + m) * splits + split
                tl.store(part_out + part[:, None] * D + d[None, :], result, mask=md_valid)
                lse = tl.where(total > 0, peak + tl.log2(whole), float("-inf"))
                tl.store(part_lse + part, lse, mask=m_valid)
                tl.debug_barrier()  # all threads' stores come before the arrival
                arrival = arrivals + row * kv_heads + kv_head
                if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == active - 1:
                    tl.store(arrival, 0)
                    target = out + first_head * D
                    _merge(
                        part_out,
                        part_lse,
                        target,
                        first_cell,
                        active,
                        splits,
                        GROUP,
                        D,
                        2 * BLOCK_HALF,
                        BLOCK_G,
                        BLOCK_P,
                    )


def serves(few: Few, cache: Tensor, spec: AttentionSpec) -> bool:
    """Return whether `attend` computes these rows of a step."""
    if few.rows is not None or few.queries > 1 or few.shared is not None or form_of(cache.dtype) != PLAIN:
        return False
    return few.count * spec.num_kv_heads <= MOST_HEADS and spec.num_heads // spec.num_kv_heads <= _MOST_GROUP


def attend(
    qkv: Tensor,
    norms: Norms | None,
    cos_sin: Tensor,
    cache: Tensor,
    step: StepInput,
    spec: AttentionSpec,
    count: int,
    arrivals: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Do all of `FusedBackend.rotate_and_attend` for `count` rows with one query each.

    Args:
        arrivals: [MOST_HEADS] int32, zeros; zeros again once the launch has ended.
    """
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q_norm, k_norm, eps = norms if norms is not None else (cos_sin, cos_sin, 0.0)
    half, group = max(16, triton.next_power_of_2(dim // 2)), triton.next_power_of_2(heads // kv_heads)
    splits = num_splits(count * kv_heads, step.max_seq_len, qkv.device)
    out = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
    part_out = torch.empty(count * heads * splits, dim, dtype=torch.float32, device=qkv.device)
    part_lse = torch.empty(count * heads * splits, dtype=torch.float32, device=qkv.device)
    fused_decode_kernel[(kv_heads, count, splits)](
        qkv,
        q_norm,
        k_norm,
        cos_sin,
        step.positions,
        step.slot_mapping,
        cache,
        out,
        part_out,
        part_lse,
        arrivals,
        step.query_start,
        step.seq_lens,
        step.query_start if step.table_rows is None else step.table_rows,
        step.block_tables,
        eps,
        *scales_of(spec),
        *head_terms(spec, sinks, step.seq_lens),
        qkv.stride(0),
        *cache.stride()[:4],
        step.block_tables.stride(0),
        splits,
        GROUP=heads // kv_heads,
        M=16,
        HALF=dim // 2,
        BLOCK_HALF=half,
        BLOCK_N=_KEYS,
        BLOCK_G=group,
        BLOCK_P=max(1, min(triton.next_power_of_2(splits), _MERGED // (group * 2 * half))),
        PAGE=cache.shape[3],
        WINDOW=spec.window or 0,
        CHUNKED=spec.chunked,
        CAPPED=spec.soft_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=spec.slopes is not None,
        HAS_TABLE_ROWS=step.table_rows is not None,
        NORMED=norms is not None,
        num_warps=_WARPS,
        num_stages=3,
        **overlap(qkv.device),
    )
    return out
