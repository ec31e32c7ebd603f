"""Attention of rows with many queries on a Hopper GPU, by the CUDA kernel `cuda/prompts.cu`.

It does what `triton_prefill.py` does for layers with plain causal attention, over keys and values of 16 bits.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.reference import attend_dense
from octavo.nn.attention.triton_arguments import scales_of
from octavo.nn.ops import nvrtc, wgmma
from octavo.nn.ops.nvrtc import Argument, Kernel, address
from octavo.nn.ops.ring import multiprocessors
from octavo.nn.step import StepInput

QUERIES = 128
"""Of a tile."""
_PART = 64
"""Channels of a row in shared memory, of 128 bytes."""
_STAGES = 2
_ALIGNMENT = 1 << 10
_THREADS = 384
_MOST_CELLS, _MOST_CHANNELS = 1 << 31, 256
_ALIGNED = 16
"""Bytes, of addresses that the copy engine reads from."""
_LIMIT = 0.02
"""Largest relative error of the trial."""


class PromptForm(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dim: channels of a head.
        page: tokens of a KV block.
        sharing: query heads of a kv head.
        table_rows: a row's block table is looked up.
    """

    dtype: torch.dtype
    dim: int
    page: int
    sharing: int
    table_rows: bool

    @property
    def keys(self) -> int:
        """Of a tile."""
        return _keys_of(self.dim)

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        query_stages = 1 if self.dim > 128 else 2
        return 2 * self.dim * (query_stages * QUERIES + 2 * _STAGES * self.keys) + _ALIGNMENT


def serves(q: Tensor, fresh: Tensor | None, cache: Tensor, step: StepInput, spec: AttentionSpec) -> bool:
    """Return whether `attend` computes a layer's rows with many queries."""
    if spec.window is not None or spec.soft_cap is not None or spec.slopes is not None or spec.sinks:
        return False
    if fresh is None or step.unseen is not None or step.ahead is not None or spec.scale <= 0:
        return False
    dim, page = cache.shape[4], cache.shape[3]
    if dim % _PART or dim > _MOST_CHANNELS or page % 8 or _keys_of(dim) % page:
        return False
    if q.dtype not in (torch.float16, torch.bfloat16) or cache.dtype != q.dtype or not _usable(q.device):
        return False
    behind = fresh.data_ptr() == q.data_ptr() + q.shape[1] * dim * q.element_size()
    adjacent = behind and q.stride() == fresh.stride() and q.stride()[1:] == (dim, 1) and q.stride(0) % _PART == 0
    cells = cache.stride()[3:] == (dim, 1) and all(stride % dim == 0 for stride in cache.stride()[:3])
    aligned = q.data_ptr() % _ALIGNED == 0 and cache.data_ptr() % _ALIGNED == 0
    return adjacent and cells and aligned and cache.stride(0) // dim * cache.shape[0] < _MOST_CELLS


@functools.cache
def _usable(device: torch.device) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why it doesn't."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return nvrtc.trusted("Prompts attend", functools.partial(_deviations, device), _LIMIT)


def attend(q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, tiles: Tensor, out: Tensor) -> None:
    """Attend with the rows of some tiles.

    Args:
        q: [T, num_heads, head_dim]; the step's keys and values follow the queries of each token in memory.
        tiles: [n, 2] int32, (row, first query of the tile in it), in descending order of their keys.
        out: [T, num_heads, head_dim], contiguous.
    """
    form = form_of(q, cache, step, spec)
    heads = spec.num_heads
    both = q.as_strided((len(q), heads + 2 * spec.num_kv_heads, spec.head_dim), q.stride())
    maps = [nvrtc.boxes_of(both, (form.keys, 1, _PART)), nvrtc.boxes_of(_cells_of(cache), (form.page, _PART))]
    table_rows = step.query_start if step.table_rows is None else step.table_rows
    tensors = (out, tiles, step.query_start, step.seq_lens, table_rows, step.block_tables)
    count = tiles.numel() // 2
    cell_strides = (stride // spec.head_dim for stride in cache.stride()[:3])
    numbers = map(c_int, (count, heads, step.block_tables.stride(0), *cell_strides))
    given: list[Argument] = [*maps, *map(address, tensors), *numbers, c_float(scales_of(spec)[0])]
    _kernel(form).launch((min(multiprocessors(q.device), count * heads), 1, 1), given)


def _cells_of(cache: Tensor) -> Tensor:
    """Return a view of all cells from the cache's first one to its last one, [n, head_dim]."""
    dim = cache.shape[4]
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:4], cache.stride()[:4], strict=True))
    return cache.as_strided((last // dim + 1, dim), (dim, 1))


def form_of(q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec) -> PromptForm:
    """Return the form of a layer's launch."""
    sharing = spec.num_heads // spec.num_kv_heads
    return PromptForm(q.dtype, spec.head_dim, cache.shape[3], sharing, step.table_rows is not None)


def compile_ahead(form: PromptForm) -> None:
    """Compile a kernel in the background."""
    nvrtc.compile_ahead(*source_of(form))


@functools.cache
def _kernel(form: PromptForm) -> Kernel:
    return Kernel("prompts", *source_of(form), _THREADS, form.shared)


def source_of(form: PromptForm) -> tuple[str, dict[str, int]]:
    """Return source and macros."""
    macros = {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(form.dtype == torch.float16), "D": form.dim}
    macros |= {"KEYS": form.keys, "PAGE": form.page, "SHARING": form.sharing, "TABLE_ROWS": int(form.table_rows)}
    source = nvrtc.source_of("barriers.cuh", "integers.cuh", "tile_ring.cuh")
    source += wgmma.fresh_tile_source("score", form.keys, form.dtype)
    source += wgmma.mixed_source("mix", form.dim, form.dtype)
    return source + _source(), macros


def _keys_of(dim: int) -> int:
    return 128 if dim <= 128 else 64


@functools.cache
def _source() -> str:
    return (Path(__file__).parent / "cuda" / "prompts.cu").read_text(encoding="utf-8")


def _deviations(device: torch.device) -> list[float]:
    """Return the relative error of a row of 100 tokens after 50 in the cache, beside the reference on the CPU."""
    random = torch.Generator().manual_seed(0)
    spec, count, past, page, dtype = AttentionSpec(4, 2, 64, 0.125), 100, 50, 16, torch.bfloat16
    qkv = torch.randn(count, 8, 64, generator=random).to(dtype)
    cache = torch.randn(10, 2, 2, page, 64, generator=random).to(dtype)
    there, projected = cache.to(device), qkv.to(device)
    whole = torch.tensor([count + past], dtype=torch.int32, device=device)
    places = torch.arange(past, past + count, device=device)
    step = StepInput(
        input_ids=places,
        positions=places,
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=whole,
        block_tables=torch.arange(10, dtype=torch.int32, device=device)[None],
        slot_mapping=places,
        logit_rows=places[-1:],
        max_query_len=count,
        max_seq_len=count + past,
    )
    out = torch.empty(count, 4, 64, dtype=dtype, device=device)
    tiles = torch.zeros(1, 2, dtype=torch.int32, device=device)
    attend(projected[:, :4], there, step, spec, tiles, out)
    keys, values = cache.transpose(0, 1).transpose(2, 3).flatten(1, 2)[:, : past + count].clone()
    keys[past:], values[past:] = qkv[:, 4:6], qkv[:, 6:]
    expected = attend_dense(qkv[:, :4], keys, values, spec).float()
    return [float((out.cpu().float() - expected).norm() / expected.norm())]
