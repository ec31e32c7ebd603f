"""Latent attention on NVIDIA GPUs in Triton: absorbed for few queries and in recorded steps, expanded for prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.attention.triton_decode import merge_kernel
from octavo.nn.attention.triton_few import Few, num_splits
from octavo.nn.latent import latent_decode, triton_parts
from octavo.nn.latent.base import LatentNorm, LatentSpec
from octavo.nn.latent.triton_absorbed import absorbed_kernel
from octavo.nn.latent.triton_expanded import expanded_kernel
from octavo.nn.latent.triton_plan import Expanded, LatentLaunches, Pieces, Tiles, divide
from octavo.nn.latent.triton_shapes import ExpandedShape, absorbed_shape, expanded_shape, tile_queries
from octavo.nn.latent.triton_write import latent_write_kernel
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.step import StepInput

_MAX_FEW = 8
_LOG2_E = math.log2(math.e)
_LEAST = 16
"""Least extent of a matrix product's dimensions."""


class TritonLatents:
    """Stateless: all its inputs are in the step. Rows of length 0 are padding."""

    name = "triton"
    follows_table_rows = True

    def __init__(self, dtype: torch.dtype, spec: LatentSpec) -> None:
        self._dtype = dtype
        self._spec = spec

    def cache_shape(self, spec: LatentSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, spec.width)

    def prepare(self, step: StepInput, block_size: int) -> LatentLaunches:
        """Divide the rows. Reads nothing from the device if `step` has `query_lens` and `past_lens`."""
        if step.max_query_len <= _MAX_FEW:
            few = Few(None, step.num_rows, 1 if step.max_query_len == 1 else _MAX_FEW)
            return LatentLaunches(few, None, None, step.num_tokens)
        counts = np.asarray(step.query_lens or step.query_start.diff().tolist(), dtype=np.int32)
        if step.past_lens is not None:
            lengths = counts + np.asarray(step.past_lens, dtype=np.int32)
        else:
            lengths = np.asarray(step.seq_lens.tolist(), dtype=np.int32)
        queries = _expanded_shape(self._dtype, self._spec, step.device).queries
        return divide(step, counts, lengths, queries, block_size, self._spec)

    def store(
        self,
        q: Tensor,
        latents: Tensor,
        norm: LatentNorm,
        cos_sin: Tensor,
        cache: Tensor,
        step: StepInput,
        spec: LatentSpec,
    ) -> None:
        launches: LatentLaunches = step.attn
        weight, eps = norm
        block = min(16, next_power_of_2(spec.num_heads))
        # Otherwise nobody reads the latents: the absorbed form reads the cache.
        kept = launches.expanded is not None or step.exchange is not None
        latent_write_kernel[(len(q), cdiv(spec.num_heads, block) + 1)](
            q,
            latents,
            weight,
            cos_sin,
            step.positions,
            step.slot_mapping,
            cache,
            eps,
            *q.stride()[:2],
            latents.stride(0),
            *cache.stride()[:2],
            HEADS=spec.num_heads,
            BLOCK_H=block,
            NOPE=spec.nope_dim,
            RANK=spec.rank,
            BLOCK_RANK=next_power_of_2(spec.rank),
            HALF=spec.rope_dim // 2,
            BLOCK_HALF=next_power_of_2(spec.rope_dim // 2),
            PAGE=cache.shape[1],
            KEPT=kept,
            num_warps=2,
            **overlap(q.device),
        )

    def attend(
        self, q: Tensor, latents: Tensor, expansion: Tensor, cache: Tensor, step: StepInput, spec: LatentSpec
    ) -> Tensor:
        launches: LatentLaunches = step.attn
        out = torch.empty(len(q), spec.num_heads, spec.value_dim, dtype=q.dtype, device=q.device)
        if launches.few is not None or launches.many is not None:
            _attend_absorbed(q, expansion, cache, step, spec, launches, out)
        if launches.expanded is not None:  # after the absorbed form, which writes the tokens between its rows, too
            _attend_expanded(q, latents, expansion, cache, step, spec, launches.expanded, out)
        return out

    def launch_ahead(
        self, q: Tensor, latents: Tensor, expansion: Tensor, cache: Tensor, step: StepInput, spec: LatentSpec
    ) -> None:
        """Launch the Triton kernels of `attend` and compile its CUDA kernel in the background.

        For `device/ahead.py`, which only records launches: the arguments need no values.
        """
        few = step.attn.few
        if few is None or not latent_decode.serves(few, q, cache, spec):
            self.attend(q, latents, expansion, cache, step, spec)
            return
        latent_decode.compile_ahead(latent_decode.form_of(q, cache, spec), few, step)
        mixed = torch.empty(len(q), spec.num_heads, spec.rank, dtype=q.dtype, device=q.device)
        for count in latent_decode.PARTS:
            _merge(_parts(mixed, few, spec, count), few, step, spec, count, mixed)
        step.attn = replace(step.attn, few=None)
        self.attend(q, latents, expansion, cache, step, spec)

    def sharing(self) -> tuple[int, int]:
        """See `Recordable`. Common prefixes are not read once."""
        return 1, 1

    @property
    def most_few(self) -> int:
        """See `Recordable`. Steps with drafts are divided as others are."""
        return 0

    def cut(self, lens: np.ndarray, past: Sequence[int], device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """See `Recordable`. Recorded steps are short, so all rows take the absorbed form."""
        size = tile_queries(self._spec.num_heads)
        tiles = [(row, first) for row in np.flatnonzero(lens > 1).tolist() for first in range(0, lens[row], size)]
        tiles.sort(key=lambda tile: -(past[tile[0]] + tile[1]))
        return np.asarray(tiles, dtype=np.int32).ravel(), np.flatnonzero(lens == 1).astype(np.int32)

    def most_tiles(self, tokens: int, rows: int, device: torch.device) -> int:
        """See `Recordable`."""
        return tokens // tile_queries(self._spec.num_heads) + rows

    def foreseen(self, tiles: Tensor, single: Tensor, longest: int) -> LatentLaunches:
        """See `Recordable`."""
        return LatentLaunches(Few(single, len(single), 1), Tiles(tiles, len(tiles) // 2), None, longest)


def _attend_absorbed(
    q: Tensor,
    expansion: Tensor,
    cache: Tensor,
    step: StepInput,
    spec: LatentSpec,
    launches: LatentLaunches,
    out: Tensor,
) -> None:
    """Write the first `launches.absorbed` tokens of `out`."""
    count = launches.absorbed
    keys, values = expansion.split([spec.nope_dim, spec.value_dim], dim=1)
    low = torch.bmm(q[:count, :, : spec.nope_dim].transpose(0, 1), keys)  # [heads, tokens, rank]
    mixed = torch.empty(count, spec.num_heads, spec.rank, dtype=q.dtype, device=q.device)
    if launches.few is not None:
        _decode(low, q, cache, step, spec, launches.few, mixed)
    if launches.many is not None:
        many, queries = launches.many, tile_queries(spec.num_heads)
        _absorb(low, q, cache, step, spec, many.tiles, many.count, queries, mixed, (mixed, mixed), 1, tiles=True)
    torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2), out=out[:count].transpose(0, 1))


def _head_tiles(dtype: torch.dtype, spec: LatentSpec, queries: int) -> int:
    return cdiv(spec.num_heads, absorbed_shape(dtype, spec.num_heads, queries).group)


def _decode(low: Tensor, q: Tensor, cache: Tensor, step: StepInput, spec: LatentSpec, few: Few, mixed: Tensor) -> None:
    """Write the sums of latents of rows with few queries each to `mixed` [T, heads, rank]."""
    if latent_decode.serves(few, q, cache, spec):
        divided = latent_decode.division(few.count, step.max_seq_len, latent_decode.form_of(q, cache, spec))
        parts = _parts(mixed, few, spec, divided.parts)
        latent_decode.attend(low, q, cache, step, spec, few, divided, mixed, parts)
        _merge(parts, few, step, spec, divided.parts, mixed)
        return
    tiles = _head_tiles(q.dtype, spec, few.queries)
    if triton_parts.needed(few, tiles, step):
        plan = triton_parts.plan_of(few, tiles, spec, step)
        _absorb(low, q, cache, step, spec, few.rows, plan.slots, 1, mixed, plan.parts, 1, plan=plan.plan)
        triton_parts.merge(plan, few, step, spec, mixed)
        return
    # A quarter of the parts of other attention, since each part of an output is as wide as a latent.
    splits = num_splits(4 * few.count * tiles, step.max_seq_len, q.device)
    parts = _parts(mixed, few, spec, splits)
    _absorb(low, q, cache, step, spec, few.rows, few.count, few.queries, mixed, parts, splits)
    _merge(parts, few, step, spec, splits, mixed)


def _parts(mixed: Tensor, few: Few, spec: LatentSpec, count: int) -> tuple[Tensor, Tensor]:
    """Return memory for sums in `count` parts, and for the logarithms of their weights; that of the sums if it is not
    needed."""
    if count <= 1:
        return mixed, mixed
    cells = few.count * few.queries * spec.num_heads * count
    sums = torch.empty(cells * spec.rank, dtype=torch.float32, device=mixed.device)
    return sums, torch.empty(cells, dtype=torch.float32, device=mixed.device)


def _absorb(
    low: Tensor,
    q: Tensor,
    cache: Tensor,
    step: StepInput,
    spec: LatentSpec,
    items: Tensor | None,
    count: int,
    queries: int,
    mixed: Tensor,
    parts: tuple[Tensor, Tensor],
    splits: int,
    *,
    tiles: bool = False,
    plan: Tensor | None = None,
) -> None:
    """Write the sums of latents of rows, or of tiles of them, to `mixed`, or to several parts.

    Args:
        count: of items, or of the plan's slots.
    """
    shape = absorbed_shape(q.dtype, spec.num_heads, queries)
    absorbed_kernel[(_head_tiles(q.dtype, spec, queries), count, splits)](
        low,
        q,
        cache,
        mixed,
        *parts,
        step.query_start if plan is None else plan,
        step.query_start if items is None else items,
        step.query_start,
        step.seq_lens,
        step.query_start if step.table_rows is None else step.table_rows,
        step.block_tables,
        spec.scale * _LOG2_E,
        *low.stride()[:2],
        *q.stride()[:2],
        *cache.stride()[:2],
        step.block_tables.stride(0),
        splits,
        HEADS=spec.num_heads,
        GROUP=shape.group,
        QUERIES=queries,
        M=shape.rows,
        RANK=spec.rank,
        BLOCK_RANK=_padded(spec.rank),
        ROPE=spec.rope_dim,
        BLOCK_ROPE=_padded(spec.rope_dim),
        NOPE=spec.nope_dim,
        BLOCK_N=shape.keys,
        PAGE=cache.shape[1],
        DIVIDED=splits > 1,
        PLANNED=plan is not None,
        HAS_ROWS=items is not None and not tiles,
        HAS_TILES=tiles,
        HAS_TABLE_ROWS=step.table_rows is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **overlap(q.device),
    )


def _merge(
    parts: tuple[Tensor, Tensor], few: Few, step: StepInput, spec: LatentSpec, count: int, mixed: Tensor
) -> None:
    if count <= 1:
        return
    merge_kernel[(spec.num_heads, few.count * few.queries)](
        *parts,
        mixed,
        mixed,
        mixed,
        step.query_start if few.rows is None else few.rows,
        step.query_start,
        count,
        QUERIES=few.queries,
        D=spec.rank,
        BLOCK_D=next_power_of_2(spec.rank),
        BLOCK_P=next_power_of_2(count),
        ROUNDED=False,
        HAS_ROWS=few.rows is not None,
        num_warps=4,
        **overlap(mixed.device),
    )


def _attend_expanded(
    q: Tensor,
    latents: Tensor,
    expansion: Tensor,
    cache: Tensor,
    step: StepInput,
    spec: LatentSpec,
    plan: Expanded,
    out: Tensor,
) -> None:
    """Write the tokens of `out` that are in the plan's tiles."""
    sums, sums_lse = out, out
    if len(plan.pieces) > 1:
        sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        sums_lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    for i, pieces in enumerate(plan.pieces):
        source = latents if pieces.cells is None else cache.flatten(0, 1).index_select(0, pieces.cells)
        made = F.linear(source[:, : spec.rank], expansion.flatten(0, 1)).unflatten(1, (spec.num_heads, -1))
        resumes, pauses = i > 0, i < len(plan.pieces) - 1
        _expand(q, made, source, step, spec, plan.tiles, pieces, sums, sums_lse, out, resumes=resumes, pauses=pauses)


def _expand(
    q: Tensor,
    made: Tensor,
    source: Tensor,
    step: StepInput,
    spec: LatentSpec,
    tiles: Tiles,
    pieces: Pieces,
    sums: Tensor,
    sums_lse: Tensor,
    out: Tensor,
    *,
    resumes: bool,
    pauses: bool,
) -> None:
    shape = _expanded_shape(q.dtype, spec, q.device)
    expanded_kernel[(spec.num_heads, tiles.count)](
        q,
        made,
        source,
        out,
        sums,
        sums_lse,
        tiles.tiles,
        pieces.places,
        step.query_start,
        step.seq_lens,
        spec.scale * _LOG2_E,
        *q.stride()[:2],
        *made.stride()[:2],
        source.stride(0),
        HEADS=spec.num_heads,
        NOPE=spec.nope_dim,
        BLOCK_NOPE=_padded(spec.nope_dim),
        ROPE=spec.rope_dim,
        BLOCK_ROPE=_padded(spec.rope_dim),
        VALUE=spec.value_dim,
        BLOCK_VALUE=_padded(spec.value_dim),
        RANK=spec.rank,
        BLOCK_M=shape.queries,
        BLOCK_N=shape.keys,
        RESUMES=resumes,
        PAUSES=pauses,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def _expanded_shape(dtype: torch.dtype, spec: LatentSpec, device: torch.device) -> ExpandedShape:
    return expanded_shape(dtype, sum(map(_padded, (spec.nope_dim, spec.rope_dim, spec.value_dim))), device)


def _padded(extent: int) -> int:
    """Return a dimension's extent in a tile."""
    return int(max(_LEAST, next_power_of_2(extent)))
