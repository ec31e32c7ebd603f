"""Latent attention of rows with one query each on a Hopper GPU, in the absorbed form, by the CUDA kernel
`cuda/latent_decode.cu`: each latent is loaded once for up to 16 heads, two tiles ahead."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.nn.attention import triton_plan
from octavo.nn.attention.triton_few import Few
from octavo.nn.latent.base import LatentSpec
from octavo.nn.ops import nvrtc
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.step import StepInput

_MOST_HEADS = 16
"""Rows of the matrix units."""
_WARPS, _DEPTH = 16, 2
_MEMORY = 232_192
"""Most bytes of shared memory of a block, beside what it has of a fixed size."""
PARTS = (1, 2, 4, 8)
"""Numbers of parts of each row, where rows are divided alike; the next launch merges them."""
_MOST_EQUAL = 16
"""Number of blocks for each row from which on no plan is needed: even a long context is divided enough."""
_BOUNDS = triton_plan.Bounds(least=128, most=32, beside=128)
"""Of a plan: a part's sums are as many bytes as 28 latents, and are written and read."""
_TILES = 64
"""Tiles of a context that rows are divided for: lengths are on the device."""
_TILE_US, _BYTES_PER_US = 1.85, 4e6
"""Of a block alone, and of the memory, as measured on an H200."""
_BESIDE_US = {1: 3.5, 2: 4.5, 4: 4.7, 8: 5.9, 16: 8.3}
"""Blocks of a cluster -> microseconds before and after its tiles."""
_MERGED_US = 2.4
"""Of the launch that merges parts."""
_ALIGNED = 16
"""Bytes that the kernel copies at a time."""
_LIMIT = 0.02
"""Largest relative error of the trial."""
_LOG2_E = math.log2(math.e)


class LatentForm(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: of queries and cache, 16 bits wide.
        page: tokens of a KV block.
    """

    dtype: torch.dtype
    heads: int
    rank: int
    rope: int
    nope: int
    page: int


class Division(NamedTuple):
    """How blocks share a row: `splits` of a cluster, which merges their sums, times `parts`, or as many parts as a plan
    gives it by its length (0)."""

    splits: int
    parts: int


def serves(few: Few, q: Tensor, cache: Tensor, spec: LatentSpec) -> bool:
    """Return whether `attend` computes these rows of a step."""
    if few.queries > 1 or not few.count or spec.num_heads > _MOST_HEADS:
        return False
    narrow = q.dtype == cache.dtype and q.dtype in (torch.float16, torch.bfloat16)
    sizes = spec.rank % (16 * _WARPS) == 0 and spec.width % 64 == 0 and spec.nope_dim % 8 == 0
    if not (narrow and sizes and _shared_memory(spec.width) <= _MEMORY):
        return False
    places = (cache.data_ptr(), q.data_ptr(), *(2 * stride for stride in (*q.stride()[:2], *cache.stride()[:2])))
    return not any(place % _ALIGNED for place in places) and _usable(q.device)


@functools.cache
def _usable(device: torch.device) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why it doesn't."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return nvrtc.trusted("Latents are decoded", functools.partial(_deviations, device), _LIMIT)


def division(rows: int, most_keys: int, form: LatentForm) -> Division:
    """Return how blocks share rows with contexts of at most this many keys."""
    equal = _equal(rows, form)
    if equal.splits * equal.parts >= _MOST_EQUAL or most_keys < 2 * _BOUNDS.least:
        return equal
    return Division(widest(rows, _clusters(form)), 0)


@functools.cache
def _equal(rows: int, form: LatentForm) -> Division:
    return fastest(rows, form, _clusters(form))


def widest(rows: int, clusters: Mapping[int, int]) -> int:
    """Return the most blocks of a cluster with which all rows run at once; 1 if none."""
    return max((splits for splits, at_once in clusters.items() if rows <= at_once), default=1)


@functools.cache
def _clusters(form: LatentForm) -> Mapping[int, int]:
    """Return how many clusters run at once, of each number of blocks."""
    single = torch.cuda.get_device_properties().multi_processor_count
    return {splits: _kernel(form, splits).most_clusters() if splits > 1 else single for splits in _BESIDE_US}


def fastest(rows: int, form: LatentForm, clusters: Mapping[int, int]) -> Division:
    """Return the division with which rounds of clusters should be over first.

    Args:
        clusters: blocks of a cluster -> clusters that run at once.
    """
    tile = 4 * _WARPS * (form.rank + form.rope) * form.dtype.itemsize
    sums = rows * form.heads * form.rank * 4

    def microseconds(divided: Division) -> float:
        splits, parts = divided
        wanted, at_once = rows * parts, max(1, clusters[splits])
        busy = min(wanted, at_once) * splits
        each = -(-_TILES // (splits * parts)) * max(_TILE_US, busy * tile / _BYTES_PER_US) + _BESIDE_US[splits]
        merged = _MERGED_US + 2 * parts * sums / _BYTES_PER_US if parts > 1 else 0.0
        return -(-wanted // at_once) * each + merged

    return min(itertools.starmap(Division, itertools.product(_BESIDE_US, PARTS)), key=microseconds)


def form_of(q: Tensor, cache: Tensor, spec: LatentSpec) -> LatentForm:
    """Return the form of a layer's launch."""
    return LatentForm(q.dtype, spec.num_heads, spec.rank, spec.rope_dim, spec.nope_dim, cache.shape[1])


def attend(
    low: Tensor,
    q: Tensor,
    cache: Tensor,
    step: StepInput,
    spec: LatentSpec,
    few: Few,
    divided: Division,
    out: Tensor,
    parts: tuple[Tensor, Tensor],
) -> None:
    """Write the sums of latents of these rows' tokens.

    Args:
        low: [heads, T, rank], queries times the heads' key matrices.
        q: [T, heads, query_dim]; only the rotated channels are read.
        out: [T, heads, rank], of q's dtype; not written if `divided` has several parts for each row.
        parts: then sums [rows, heads, parts, rank] and the logarithms, to base 2, of their weights
            [rows, heads, parts], float32.
    """
    form, plan, ended, grid = form_of(q, cache, spec), None, None, (few.count, divided.parts)
    if divided.parts == 0:
        plan, ended, parts = _planned(few, step, form, divided.splits)
        grid = len(plan), 1
    listed = [plan, ended, few.rows, step.query_start, step.seq_lens, step.table_rows]
    strides = (*low.stride()[:2], *q.stride()[:2], *cache.stride()[:2], step.block_tables.stride(0))
    arguments: list[c_void_p | c_float | c_int] = [*map(address, (low, q, cache, out, *parts))]
    arguments += [c_void_p() if one is None else address(one) for one in (*listed, step.block_tables)]
    arguments += [c_float(spec.scale * _LOG2_E), *map(c_int, strides)]
    _kernel(form, divided.splits).launch((divided.splits, *grid), arguments)


def _planned(few: Few, step: StepInput, form: LatentForm, splits: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return a plan, [slots, 4], which the first of the step's layers makes; its counters; and memory for the sums of
    parts, [parts, heads, rank], and for the logarithms, to base 2, of their weights, [parts, splits, heads]."""
    more, counters = 2 * _clusters(form)[splits], few.count * splits
    slots = few.count + more
    plan = few.plans.get(splits)
    if plan is None:
        plan = few.plans[splits] = torch.empty(4 * slots + counters, dtype=torch.int32, device=step.device)
        triton_plan.launch(plan, few.rows, step.seq_lens, few.count, more, counters, _BOUNDS)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": step.device}
    sums, lse = torch.empty(more, form.heads, form.rank, **kind), torch.empty(more, splits, form.heads, **kind)
    return plan[: 4 * slots].view(slots, 4), plan[4 * slots :], (sums, lse)


def compile_ahead(form: LatentForm, few: Few, step: StepInput) -> None:
    """Compile a kernel in the background, and launch the one that plans."""
    source, macros, _, _ = source_of(form)
    nvrtc.compile_ahead(source, macros)
    plan = torch.empty(4 * (few.count + 1) + 1, dtype=torch.int32, device=step.device)
    triton_plan.launch(plan, few.rows, step.seq_lens, few.count, 1, 1, _BOUNDS)


@functools.cache
def _kernel(form: LatentForm, splits: int) -> Kernel:
    return Kernel("latent_decode", *source_of(form), cluster=splits)


def source_of(form: LatentForm) -> tuple[str, dict[str, int], int, int]:
    """Return source, macros, threads and bytes of shared memory."""
    source = nvrtc.source_of("integers.cuh", "copies.cuh", "tiles.cuh", "clusters.cuh") + _source()
    macros = {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(form.dtype == torch.float16)}
    macros |= {"WARPS": _WARPS, "DEPTH": _DEPTH, "MOST": _BOUNDS.most}
    macros |= {name.upper(): getattr(form, name) for name in ("heads", "rank", "rope", "nope", "page")}
    return source, macros, 32 * _WARPS, _shared_memory(form.rank + form.rope)


def _shared_memory(width: int) -> int:
    """Return the bytes of a block's dynamic shared memory: tiles, and the scores and weights of one."""
    tile, heads = 4 * _WARPS, _MOST_HEADS
    return (_DEPTH + 1) * tile * width * 2 + 2 * heads * (tile + 4) * 4 + heads * (tile + 8) * 2


@functools.cache
def _source() -> str:
    return (Path(__file__).parent / "cuda" / "latent_decode.cu").read_text(encoding="utf-8")


def _deviations(device: torch.device) -> list[float]:
    """Return the relative error for each cluster size, on two rows, one of them shorter than a tile."""
    random = torch.Generator().manual_seed(0)
    spec, page, dtype = LatentSpec(16, 512, 64, 128, 128, 0.07), 16, torch.bfloat16
    lengths = (300, 5)
    blocks = sum(-(-length // page) for length in lengths)
    cache = torch.randn(blocks, page, spec.width, generator=random).to(dtype)
    low = torch.randn(spec.num_heads, len(lengths), spec.rank, generator=random).to(dtype)
    q = torch.randn(len(lengths), spec.num_heads, spec.query_dim, generator=random).to(dtype)
    first = -(-lengths[0] // page)
    tables = torch.tensor([list(range(first)), [first] * first], dtype=torch.int32, device=device)
    counted = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    nothing = torch.zeros(len(lengths), dtype=torch.long, device=device)
    step = StepInput(
        input_ids=nothing,
        positions=nothing,
        query_start=counted,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=nothing,
        logit_rows=nothing,
        max_query_len=1,
        max_seq_len=max(lengths),
    )
    expected = torch.empty(len(lengths), spec.num_heads, spec.rank)
    for row, (length, begin) in enumerate(zip(lengths, (0, first), strict=True)):
        latents = cache[begin:].flatten(0, 1)[:length].float()
        query = torch.cat([low[:, row], q[row, :, spec.nope_dim :]], dim=1).float()
        expected[row] = (spec.scale * query @ latents.T).softmax(1) @ latents[:, : spec.rank]
    deviations = []
    there, few = (low.to(device), q.to(device), cache.to(device)), Few(None, len(lengths), 1)
    for splits in _BESIDE_US:
        out = torch.empty(len(lengths), spec.num_heads, spec.rank, dtype=dtype, device=device)
        attend(*there, step, spec, few, Division(splits, 1), out, (out, out))
        deviations.append(float((out.cpu().float() - expected).norm() / expected.norm()))
    return deviations
