"""Attention of rows with few queries on a GPU: split into parts, with common prefixes read once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.attention import triton_plan
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.fp8 import PLAIN, form_of, means_of, tile_width
from octavo.nn.attention.triton_arguments import Output, as_words, head_terms, scales_of, two_strides
from octavo.nn.attention.triton_decode import COMMON, PLANNED, REST, WHOLE, decode_kernel, merge_kernel
from octavo.nn.attention.triton_shapes import decode_shape
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.step import SharedContexts, StepInput

SHARED_TOKENS = 64
"""Common prefixes are multiples of this many tokens, where tiles of keys of all shapes end."""
_SHARED_HEADS = 64
"""Query heads in a tile that many rows share: the width of Hopper's matrix instruction."""
_MAX_SPLITS = 32
_MERGED = 2048
"""Outputs that a warp merges at a time. With more, the kernel takes more registers."""
_EACH = 8
"""Programs of a multiprocessor that read one query's contexts."""
_MOST_EQUAL = 16
"""Number of parts per context from which on no plan is needed: even a long context is divided enough."""


@dataclass(frozen=True, slots=True)
class Few:
    """Rows with at most `queries` queries each. `rows` [count] int32 are their indices, None means all.

    `shared`: common prefixes of the step's rows, to be read once; each row then has one query. `plans`: those that
    earlier layers of the step have made (`triton_plan.py`), by number of kv heads.
    """

    rows: Tensor | None
    count: int
    queries: int
    shared: SharedContexts | None = None
    plans: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PartialOutputs:
    """Outputs [rows x queries, heads, count, head_dim] and their log-sum-exps, before they are merged."""

    out: Tensor
    lse: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """The input of one launch of the kernel, and the parts that it computes."""

    kind: int
    items: int
    queries: int
    splits: int
    first_part: int
    rows: Tensor
    shared: Tensor


def most_sharing(group: int) -> int:
    """Return how many rows with a common prefix fit one tile, if `group` query heads share a kv head."""
    return max(1, _SHARED_HEADS // group)


def tile_rows(group: int, queries: int, form: int) -> int:
    """Return the rows of a tile for this many queries of `group` query heads. Two warps, of 16 each, load faster than
    one, even if a row verifies so few drafts that one would do."""
    return max(32 if queries > 1 and form == PLAIN else 16, next_power_of_2(group * queries))


def one_loop(queries: int, splits: int, form: int) -> bool:
    """Return whether all tiles of keys are masked: a short part is read sooner by the smaller program."""
    return queries == 1 and splits > 1 and form == PLAIN


def attend_few(
    q: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    step: StepInput,
    spec: AttentionSpec,
    few: Few,
    out: Output,
    sinks: Tensor | None = None,
) -> None:
    """Write these rows of `out`. With a window, each row reads its own keys, since a common prefix may precede it; so
    it does with linear biases, which differ from row to row."""
    shared = few.shared if spec.shares_prefixes else None
    rows = few.rows if few.rows is not None else step.query_start
    if _needs_plan(few, step, spec):
        plan, slots = _plan_of(few, step, spec)
        parts = _parts_of((slots - few.count) * few.queries * spec.num_heads, slots, spec, q)
        reading = _Reading(PLANNED.value, slots, few.queries, 1, 0, rows, plan)
        _read(q, cache, scales, step, spec, reading, parts, out, sinks, few.rows is not None)
        return
    splits = num_splits(few.count * spec.num_kv_heads, step.max_seq_len, q.device, few.queries)
    divided = splits if splits > 1 else 0
    if shared is None:
        parts = _parts(divided, few, spec, q)
        readings = [_Reading(WHOLE.value, few.count, few.queries, splits, 0, rows, rows)]
    else:
        most = most_sharing(spec.num_heads // spec.num_kv_heads)
        common = _common_splits(-(-few.count // most) * spec.num_kv_heads, step.max_seq_len, q.device)
        parts = _parts(common + divided, few, spec, q)
        readings = [
            _Reading(COMMON.value, len(shared.groups), most, common, 0, shared.rows, shared.groups),
            _Reading(REST.value, few.count, 1, splits, common, rows, shared.lens),
        ]
    for reading in readings:
        _read(q, cache, scales, step, spec, reading, parts, out, sinks, few.rows is not None)
    if divided:
        _merge(q, parts, few, rows, step, spec, form_of(cache.dtype), out)


def _needs_plan(few: Few, step: StepInput, spec: AttentionSpec) -> bool:
    """Return whether contexts are divided by their lengths. Few rows have many parts each without a plan, and windows
    have about equal lengths."""
    if few.shared is not None or spec.window is not None:
        return False
    programs = _programs(step.device, few.queries)
    return few.count * spec.num_kv_heads > programs // _MOST_EQUAL and step.max_seq_len >= 2 * triton_plan.LEAST


def _plan_of(few: Few, step: StepInput, spec: AttentionSpec) -> tuple[Tensor, int]:
    """Return the plan, which the first of the step's layers makes, and its slots."""
    more = cdiv(_programs(step.device, few.queries), spec.num_kv_heads)
    slots, counters = few.count + more, few.count * spec.num_kv_heads
    plan = few.plans.get(spec.num_kv_heads)
    if plan is None:
        plan = torch.empty(4 * slots + counters, dtype=torch.int32, device=step.device)
        triton_plan.launch(plan, few.rows, step.seq_lens, few.count, more, counters)
        few.plans[spec.num_kv_heads] = plan
    return plan, slots


def _parts(count: int, few: Few, spec: AttentionSpec, unused: Tensor) -> _PartialOutputs:
    if not count:
        return _PartialOutputs(unused, unused, 0)
    return _parts_of(few.count * few.queries * spec.num_heads * count, count, spec, unused)


def _parts_of(cells: int, count: int, spec: AttentionSpec, unused: Tensor) -> _PartialOutputs:
    part_out = torch.empty(cells * spec.head_dim, dtype=torch.float32, device=unused.device)
    return _PartialOutputs(part_out, torch.empty(cells, dtype=torch.float32, device=unused.device), count)


def _read(
    q: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    step: StepInput,
    spec: AttentionSpec,
    reading: _Reading,
    parts: _PartialOutputs,
    out: Output,
    sinks: Tensor | None,
    has_rows: bool,
) -> None:
    form, cells = as_words(cache)
    group = spec.num_heads // spec.num_kv_heads
    block_d = tile_width(spec.head_dim, form)
    heads, sparse = tile_rows(group, reading.queries, form), reading.splits == _MAX_SPLITS
    shape = decode_shape(q.dtype, block_d, form, heads, sparse=sparse, wide=reading.queries > 8)
    divided, groups = reading.kind == COMMON.value or reading.splits > 1, next_power_of_2(group)
    last = (reading.splits, reading.items) if reading.kind == COMMON.value else (reading.items, reading.splits)
    decode_kernel[(spec.num_kv_heads, *last)](
        q,
        cells,
        step.seq_lens if scales is None else scales,
        *((q, q) if divided else out.arguments()),
        parts.out,
        parts.lse,
        reading.rows,
        reading.shared,
        step.query_start,
        step.seq_lens,
        step.query_start if step.table_rows is None else step.table_rows,
        step.block_tables,
        *scales_of(spec),
        *head_terms(spec, sinks, step.seq_lens),
        step.seq_lens if step.unseen is None else step.unseen,
        *two_strides(q),
        *cells.stride()[:4],
        step.block_tables.stride(0),
        reading.splits,
        parts.count,
        reading.first_part,
        GROUP=group,
        GROUPS=groups,
        MERGED=max(1, min(16, _MERGED * shape.warps // (groups * block_d))),
        QUERIES=reading.queries,
        M=shape.queries,
        D=spec.head_dim,
        BLOCK_D=block_d,
        BLOCK_N=shape.keys,
        PAGE=cache.shape[3],
        WINDOW=spec.window or 0,
        CHUNKED=spec.chunked,
        CAPPED=spec.soft_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=spec.slopes is not None,
        BRANCHES=step.unseen is not None and reading.kind != COMMON.value,
        DIVIDED=divided,
        READS=reading.kind,
        ROUNDED=out.inverse is not None and not divided,
        HAS_ROWS=has_rows,
        HAS_TABLE_ROWS=step.table_rows is not None,
        FORM=form,
        MEANS=means_of(q.device),
        ONE_LOOP=one_loop(reading.queries, reading.splits, form),
        num_warps=shape.warps,
        num_stages=shape.stages,
        maxnreg=shape.registers,
        **overlap(q.device),
    )


def _merge(
    q: Tensor,
    parts: _PartialOutputs,
    few: Few,
    rows: Tensor,
    step: StepInput,
    spec: AttentionSpec,
    form: int,
    out: Output,
) -> None:
    merge_kernel[(spec.num_heads, few.count * few.queries)](
        parts.out,
        parts.lse,
        out.arguments()[0],
        q,
        out.arguments()[1],
        rows,
        step.query_start,
        parts.count,
        QUERIES=few.queries,
        D=spec.head_dim,
        BLOCK_D=tile_width(spec.head_dim, form),
        BLOCK_P=next_power_of_2(parts.count),
        ROUNDED=out.inverse is not None,
        HAS_ROWS=few.rows is not None,
        num_warps=4 if parts.count > 4 else 1,
        **overlap(q.device),
    )


def num_splits(programs: int, max_seq_len: int, device: torch.device, queries: int = 1) -> int:
    """Return the number of parts of each context, a power of two: enough to fill the GPU, none below 256 keys."""
    return _power_of_two(_programs(device, queries) // max(programs, 1), max_seq_len)


def _programs(device: torch.device, queries: int) -> int:
    """Return how many programs fill a GPU. Those for several queries have two warps, and more outputs to merge; those
    for more than eight have large tiles."""
    each = _EACH if queries == 1 else 4 if queries <= 8 else 2
    return each * _multiprocessors(device)


def _common_splits(programs: int, max_seq_len: int, device: torch.device) -> int:
    """Return the number of parts of common prefixes, which are attended concurrently with the rest."""
    return _power_of_two(_multiprocessors(device) // programs, max_seq_len)


def _power_of_two(wanted: int, max_seq_len: int) -> int:
    return 1 << max(0, min(wanted, max_seq_len // 256, _MAX_SPLITS).bit_length() - 1)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
