"""Decoding of few rows on a Hopper GPU in one launch, by the CUDA kernel `cuda/fused_decode.cu`: norms and rotation of
heads, storing, attention and merging.

With one row, launches take longer to begin and to end than to compute; and while attention merges, the launch after it
can already load its weights.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.reference import attend_dense
from octavo.nn.attention.triton_arguments import head_terms, scales_of
from octavo.nn.attention.triton_few import Few
from octavo.nn.ops import nvrtc
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.step import StepInput

_MOST_SHARING = 8
_TILE = 16
_ALIGNED = 16
"""Bytes that the kernel copies at a time."""
_LIMIT = 0.02
"""Largest relative error of the trial."""


class Division(NamedTuple):
    """How a launch is divided.

    Attributes:
        splits: blocks that share a kv head's context, one cluster.
        warps: of a block. If there are more than 32 in a cluster, these share only long contexts.
        depth: tiles of a warp in shared memory.
    """

    splits: int
    warps: int
    depth: int


_LARGE = {
    8: Division(8, 8, 2),
    16: Division(8, 8, 1),
    32: Division(16, 2, 2),
    64: Division(2, 16, 1),
    128: Division(2, 8, 1),
    256: Division(1, 8, 1),
}
"""Most clusters -> the division that is fastest on an H200 for most contexts, if heads have `_LARGE_DIM`. With more,
programs of `triton_decode.py` fill the GPU."""
_ANY_LENGTH, _MOST_TOKENS = 64, 8192
"""Maximum number of clusters for contexts of any length. With more clusters a context has few warps, so they serve only
models with at most `_MOST_TOKENS` tokens; for longer ones `triton_plan.py` is faster if one context is long."""
_LARGE_DIM = 128
"""Most channels of a head with which tiles of eight warps fit into shared memory."""
_MOST_STATIC = 40 << 10
"""Maximum bytes of a block's partial sums. CUDA limits static shared memory to 48 KiB."""
_NARROW = Division(8, 2, 2)
"""Used where another division would exceed `_MOST_STATIC`."""
_SMALL = {32: Division(16, 2, 2)}
"""For larger heads."""


class DecodeForm(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: of projections and cache, 16 bits wide.
        sharing: query heads of a kv head.
        page: tokens of a KV block.
        window: 0 for none.
        capped: scores have a soft cap.
        table_rows: a row's block table is looked up.
    """

    division: Division

    dtype: torch.dtype
    dim: int
    sharing: int
    page: int
    normed: bool
    window: int
    chunked: bool
    capped: bool
    sinks: bool
    slopes: bool
    table_rows: bool


def serves(few: Few, step: StepInput, qkv: Tensor, norms: Norms | None, cache: Tensor, spec: AttentionSpec) -> bool:
    """Return whether `attend` computes these rows of a step. Norms whose weights are float32 (Gemma's) are not
    supported, nor are trees of drafts, even in a part of a step that has one draft of each row."""
    if step.unseen is not None:
        return False
    if few.rows is not None or few.queries > 1 or (few.shared is not None and spec.shares_prefixes):
        return False
    clusters, divisions = few.count * spec.num_kv_heads, _divisions(spec.head_dim)
    longest = min(step.max_seq_len, spec.window or step.max_seq_len)
    most = max(most for most in divisions if longest <= _MOST_TOKENS or most <= _ANY_LENGTH)
    if clusters > most or spec.num_heads // spec.num_kv_heads > _MOST_SHARING:
        return False
    dtypes = {qkv.dtype, cache.dtype} if norms is None else {qkv.dtype, cache.dtype, norms[0].dtype, norms[1].dtype}
    narrow = len(dtypes) == 1 and qkv.dtype in (torch.float16, torch.bfloat16) and cache.data_ptr() % _ALIGNED == 0
    return narrow and spec.head_dim % 32 == 0 and spec.head_dim <= 256 and _usable(qkv.device)


@functools.cache
def _usable(device: torch.device) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why it doesn't."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return nvrtc.trusted("Single rows attend", functools.partial(_deviations, device), _LIMIT)


def form_of(
    qkv: Tensor,
    norms: Norms | None,
    cache: Tensor,
    step: StepInput,
    spec: AttentionSpec,
    count: int,
    sinks: Tensor | None,
) -> DecodeForm:
    """Return the form of a layer's launch for `count` rows."""
    return DecodeForm(
        division=_division_of(count * spec.num_kv_heads, spec.head_dim, spec.num_heads // spec.num_kv_heads),
        dtype=qkv.dtype,
        dim=spec.head_dim,
        sharing=spec.num_heads // spec.num_kv_heads,
        page=cache.shape[3],
        normed=norms is not None,
        window=spec.window or 0,
        chunked=spec.chunked,
        capped=spec.soft_cap is not None,
        sinks=sinks is not None,
        slopes=spec.slopes is not None,
        table_rows=step.table_rows is not None,
    )


def _divisions(dim: int) -> dict[int, Division]:
    return _LARGE if dim <= _LARGE_DIM else _SMALL


def _division_of(clusters: int, dim: int, sharing: int) -> Division:
    found = next(division for most, division in _divisions(dim).items() if clusters <= most)
    return found if found.warps * sharing * dim * 4 <= _MOST_STATIC else _NARROW


def attend(
    qkv: Tensor,
    norms: Norms | None,
    cos_sin: Tensor,
    cache: Tensor,
    step: StepInput,
    spec: AttentionSpec,
    count: int,
    sinks: Tensor | None,
) -> Tensor:
    """Do all of `FusedBackend.rotate_and_attend` for `count` rows with at most one query each."""
    q_norm, k_norm, eps = norms if norms is not None else (cos_sin, cos_sin, 0.0)
    sink_terms, slopes = head_terms(spec, sinks, step.seq_lens)
    table_rows = step.query_start if step.table_rows is None else step.table_rows
    out = torch.empty(len(qkv), spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    tensors = [qkv, q_norm, k_norm, cos_sin, step.positions, step.slot_mapping, cache, out, step.query_start]
    tensors += [step.seq_lens, table_rows, step.block_tables, sink_terms, slopes]
    numbers = [c_float(number) for number in (eps, *scales_of(spec))]
    strides = [c_int(stride) for stride in (qkv.stride(0), *cache.stride()[:4], step.block_tables.stride(0))]
    arguments: list[c_void_p | c_float | c_int] = [*map(address, tensors), *numbers, *strides]
    form = form_of(qkv, norms, cache, step, spec, count, sinks)
    _kernel(form).launch((form.division.splits, spec.num_kv_heads, count), arguments)
    return out


def compile_ahead(form: DecodeForm) -> None:
    """Compile a kernel in the background."""
    source, macros, _, _ = source_of(form)
    nvrtc.compile_ahead(source, macros)


@functools.cache
def _kernel(form: DecodeForm) -> Kernel:
    return Kernel("fused_decode", *source_of(form), cluster=form.division.splits)


def source_of(form: DecodeForm) -> tuple[str, dict[str, int], int, int]:
    """Return source, macros, threads and bytes of shared memory."""
    source = nvrtc.source_of("integers.cuh", "copies.cuh", "tiles.cuh", "clusters.cuh") + _source()
    macros = {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(form.dtype == torch.float16), "D": form.dim}
    splits, warps, depth = form.division
    macros |= {"SPLITS": splits, "WARPS": warps, "DEPTH": depth}
    own = ("sharing", "page", "normed", "window", "chunked", "capped", "sinks", "slopes", "table_rows")
    macros |= {name.upper(): int(getattr(form, name)) for name in own}
    return source, macros, 32 * warps, warps * depth * 2 * _TILE * 2 * (form.dim + 8)


@functools.cache
def _source() -> str:
    return (Path(__file__).parent / "cuda" / "fused_decode.cu").read_text(encoding="utf-8")


def _deviations(device: torch.device) -> list[float]:
    """Return the relative error of a row of 100 tokens, compared with the reference on the CPU."""
    random = torch.Generator().manual_seed(0)
    spec, length, page, dtype = AttentionSpec(8, 2, 64, 0.125), 100, 16, torch.bfloat16
    qkv = torch.randn(1, 12, 64, generator=random).to(dtype)
    cache = torch.randn(7, 2, 2, page, 64, generator=random).to(dtype)
    still = torch.cat([torch.ones(length, 32), torch.zeros(length, 32)], dim=1).to(device)
    there = cache.to(device)
    whole = torch.tensor([length], device=device)
    step = StepInput(
        input_ids=whole,
        positions=whole - 1,
        query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seq_lens=whole.int(),
        block_tables=torch.arange(7, dtype=torch.int32, device=device)[None],
        slot_mapping=whole - 1,
        logit_rows=whole - 1,
        max_query_len=1,
        max_seq_len=length,
    )
    made = attend(qkv.to(device), None, still, there, step, spec, 1, None).cpu().float()
    keys, values = cache.transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, :length].clone()
    keys[-1], values[-1] = qkv[0, 8:10], qkv[0, 10:]
    expected = attend_dense(qkv[:, :8], keys, values, spec).float()
    return [float((made - expected).norm() / expected.norm())]
