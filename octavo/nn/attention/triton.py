"""Attention on NVIDIA GPUs in Triton: one kernel for rows with few queries, one for rows with many."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.device.transfer import upload_parts
from octavo.nn.attention import fused_decode, prompt_tiles
from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.fp8 import PLAIN, form_of, means_of, tile_width
from octavo.nn.attention.triton_arguments import Output, as_words, head_terms, scales_of, two_strides
from octavo.nn.attention.triton_few import SHARED_TOKENS, Few, attend_few, most_sharing
from octavo.nn.attention.triton_prefill import prefill_kernel
from octavo.nn.attention.triton_shapes import prefill_shape
from octavo.nn.attention.triton_write import rotate_write_kernel, rotate_write_rows_kernel, write_kernel
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.step import StepInput

_MAX_FEW = 8
_WIDEST = 32
"""Most queries of a row that `TritonAttention.widen` prepares for."""
_MOST_ROWS = 128
"""Maximum rows of a tile, of queries times heads, that it makes larger than for `_MAX_FEW`; with more channels than
`_MOST_CHANNELS` half of it, and in float32, which takes many registers to multiply, a quarter."""
_MOST_CHANNELS = 128
MANY_WRITTEN = 512
"""Tokens from which on a program rotates and stores most or all of a token's heads."""
_WRITTEN, _PER_THREAD = 1024, 8
"""Numbers of such a program, and of its threads, in the first halves of heads."""


@dataclass(frozen=True, slots=True)
class Many:
    """Tiles of rows with many queries: [count, 2] int32, (row, first query of the tile in it). No row has more than
    `longest` queries, and no tile more than `queries`."""

    tiles: Tensor
    count: int
    longest: int
    queries: int


@dataclass(frozen=True, slots=True)
class Launches:
    """One step's attention: at most one launch of each kind per layer, the tiles on the stream `beside` if given, where
    decoding needs a part of the GPU at the same time."""

    few: Few | None
    many: Many | None
    beside: torch.cuda.Stream | None = None


class TritonAttention:
    """All its inputs are in the step. Rows of length 0 are padding and get zeros.

    Attributes:
        branches: `widen` was called: drafts may branch.
    """

    name = "triton"
    follows_table_rows = True

    def __init__(self, dtype: torch.dtype, spec: AttentionSpec) -> None:
        self._dtype = dtype
        self._head_dim = spec.head_dim
        self._group = spec.num_heads // spec.num_kv_heads
        self._most_few = _MAX_FEW
        self.branches = False

    @property
    def most_few(self) -> int:
        """See `Recordable`."""
        return self._most_few

    def widen(self, queries: int) -> int:
        """See `BranchingBackend`. Rows whose queries don't fit one tile stay with the kernel of many queries, which
        computes the same, but does not divide contexts."""
        self.branches = True
        wanted = next_power_of_2(queries)
        most_rows = _MOST_ROWS if self._head_dim <= _MOST_CHANNELS else _MOST_ROWS // 2
        most_rows = most_rows if self._dtype.itemsize < 4 else _MOST_ROWS // 4
        if wanted <= _WIDEST and next_power_of_2(self._group * wanted) <= most_rows:
            self._most_few = max(self._most_few, wanted)
        return self._most_few

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[block, key or value, head, offset in the block, channel]: one head's part of a block is contiguous."""
        return (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)

    def prepare(self, step: StepInput, block_size: int) -> Launches:
        """Divide the rows over the two kernels. Reads nothing from the device if `step.query_lens` is given."""
        if (few := self.all_few(step)) is not None:
            return Launches(few, None)
        lens = step.query_lens if step.query_lens is not None else step.query_start.diff().tolist()
        return self._divide(np.asarray(lens, dtype=np.int32), step.past_lens or [0] * len(lens), step.device)

    def all_few(self, step: StepInput) -> Few | None:
        """Return the step's rows if none has many queries, else None."""
        longest = step.max_query_len
        if longest > self._most_few or (step.ahead is not None and longest > 1):
            return None
        queries = next(most for most in (1, _MAX_FEW, self._most_few) if longest <= most)
        return Few(None, step.num_rows, queries, step.shared)

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        _, heads, dim = k.shape
        write_kernel[(k.shape[0],)](
            k,
            v,
            cache,
            step.slot_mapping,
            *two_strides(k),
            *two_strides(v),
            *cache.stride()[:4],
            HEADS=heads,
            BLOCK_H=next_power_of_2(heads),
            D=dim,
            BLOCK_D=next_power_of_2(dim),
            PAGE=cache.shape[3],
        )

    def rotate_and_attend(
        self,
        qkv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        rounded_by: Tensor | None = None,
    ) -> Tensor:
        """See `FusedBackend`. Rows with many queries read this step's keys and values from `qkv`. The CUDA kernel of
        few rows does not round."""
        launches: Launches = step.attn
        few = launches.few if launches.many is None else None
        if few is not None and fused_decode.serves(few, step, qkv, norms, cache, spec):
            return fused_decode.attend(qkv, norms, cos_sin, cache, step, spec, few.count, sinks)
        rotate_and_write(qkv, norms, cos_sin, cache, scales, step, kept=launches.many is not None)
        q, fresh = qkv[:, : spec.num_heads], qkv[:, spec.num_heads :]
        return attend_parts(q, fresh, cache, scales, step, spec, sinks, rounded_by)

    def launch_ahead(
        self,
        qkv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        rounded_by: Tensor | None = None,
    ) -> None:
        """Launch the Triton kernels of `rotate_and_attend` and compile its CUDA kernels in the background.

        For `device/ahead.py`, which only records launches: the arguments need no values.
        """
        launches: Launches = step.attn
        few = launches.few if launches.many is None else None
        if few is not None and fused_decode.serves(few, step, qkv, norms, cache, spec):
            fused_decode.compile_ahead(fused_decode.form_of(qkv, norms, cache, step, spec, few.count, sinks))
            return
        q, fresh = qkv[:, : spec.num_heads], qkv[:, spec.num_heads :]
        if launches.many is not None and prompt_tiles.serves(q, fresh, cache, step, spec):
            prompt_tiles.compile_ahead(prompt_tiles.form_of(q, cache, step, spec))
            step = replace(step, attn=replace(launches, beside=_stream(step.device)))  # as recorded steps have it
        self.rotate_and_attend(qkv, norms, cos_sin, cache, scales, step, spec, sinks, rounded_by)
        if step.num_tokens >= MANY_WRITTEN:  # as for as many rows of one query each
            rotate_and_write(qkv, norms, cos_sin, cache, scales, step, kept=False)

    def rotate_and_store(
        self,
        kv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
    ) -> None:
        """See `FusedBackend`."""
        rotate_and_write(kv, norms, cos_sin, cache, scales, step, kept=False)

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        return attend_parts(q, None, cache, None, step, spec, sinks)

    def attend_stored(
        self,
        q: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `FusedBackend`."""
        return attend_parts(q, None, cache, scales, step, spec, sinks)

    def move(self, caches: Tensor, sources: Tensor, targets: Tensor) -> None:
        """See `BranchingBackend`."""
        page = caches.shape[4]
        # Not all operations on FP8 numbers exist.
        cells = caches if form_of(caches.dtype) == PLAIN else caches.view(torch.uint8)
        kept = cells[:, sources // page, :, :, sources % page]
        cells[:, targets // page, :, :, targets % page] = kept

    def sharing(self) -> tuple[int, int]:
        """See `FusedBackend`."""
        return most_sharing(self._group), SHARED_TOKENS

    def peaks(self, cache: Tensor) -> Tensor:
        """See `FusedBackend`."""
        return cache.abs().amax((0, 3, 4)).float()

    def cut(self, lens: np.ndarray, past: Sequence[int], device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """See `FusedBackend`. One query goes to the first kernel, more to the second, whose tiles with the most keys
        come first."""
        single = np.flatnonzero(lens == 1).astype(np.int32)
        size = self._tile_size(device)
        tiles = [(row, first) for row in np.flatnonzero(lens > 1).tolist() for first in range(0, lens[row], size)]
        tiles.sort(key=lambda tile: -(past[tile[0]] + tile[1]))
        return np.asarray(tiles, dtype=np.int32).ravel(), single

    def foreseen(self, tiles: Tensor, single: Tensor, longest: int) -> Launches:
        """See `FusedBackend`."""
        many = Many(tiles, len(tiles) // 2, longest, self._tile_size(tiles.device))
        return Launches(Few(single, len(single), 1), many, _stream(tiles.device))

    def most_tiles(self, tokens: int, rows: int, device: torch.device) -> int:
        """See `FusedBackend`."""
        return tokens // self._tile_size(device) + rows

    def _tile_size(self, device: torch.device) -> int:
        return prefill_shape(self._dtype, self._head_dim, 1, device).queries

    def _divide(self, lens: np.ndarray, past: Sequence[int], device: torch.device) -> Launches:
        tiles, single = self.cut(lens, past, device)
        sent_tiles, sent_single = upload_parts([tiles, single], device)
        few = Few(sent_single, len(single), 1) if len(single) else None
        return Launches(few, Many(sent_tiles, len(tiles) // 2, int(lens.max()), self._tile_size(device)))


def rotate_and_write(
    qkv: Tensor,
    norms: Norms | None,
    cos_sin: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    step: StepInput,
    kept: bool,
) -> None:
    """Do the first half of `rotate_and_attend`; with `kept`, also leave the rotated keys in `qkv`, which may be without
    queries."""
    tokens, all_heads, dim = qkv.shape
    kv_heads = cache.shape[2]
    heads = all_heads - 2 * kv_heads
    half = next_power_of_2(dim // 2)
    kernel, block, groups, warps = writing(tokens, heads, kv_heads, half)
    q_norm, k_norm, eps = norms if norms is not None else (cos_sin, cos_sin, 0.0)
    form = form_of(cache.dtype)
    cells = cache if form == PLAIN else cache.view(torch.uint8)
    kernel[tokens, groups](
        qkv,
        q_norm,
        k_norm,
        cos_sin,
        step.positions,
        step.slot_mapping,
        cells,
        cos_sin if scales is None else scales,
        eps,
        qkv.stride(0),
        *cells.stride()[:4],
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK_H=block,
        HALF=dim // 2,
        BLOCK_HALF=half,
        PAGE=cache.shape[3],
        NORMED=norms is not None,
        KEPT=kept,
        FORM=form,
        num_warps=warps,
        **overlap(qkv.device),
    )


def writing(tokens: int, heads: int, kv_heads: int, half: int) -> tuple[Any, int, int, int]:
    """Return how `rotate_and_write` does its work: the kernel, heads of a program, programs of a token, warps.

    A thread has 8 numbers of half a head in both kernels, so that they add up squares in the same order.
    """
    of_warp = 32 * _PER_THREAD
    if tokens >= MANY_WRITTEN:
        all_heads = heads + 2 * kv_heads
        block = min(next_power_of_2(all_heads), max(1, _WRITTEN // half))
        return rotate_write_rows_kernel, block, cdiv(all_heads, block), max(1, block * half // of_warp)
    block = max(min(8, next_power_of_2(kv_heads)), of_warp // half)
    groups = cdiv(heads, block) + cdiv(kv_heads, block)
    return rotate_write_kernel, block, groups, min(2, block * half // of_warp)


def attend_parts(
    q: Tensor,
    fresh: Tensor | None,
    cache: Tensor,
    scales: Tensor | None,
    step: StepInput,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    rounded_by: Tensor | None = None,
) -> Tensor:
    """Attend. `fresh` [T, 2 num_kv_heads, head_dim]: the step's keys and values, in rows of the tensor that q is from;
    `rounded_by`: as for `FusedBackend`."""
    launches: Launches = step.attn
    out = Output.of(q, rounded_by)
    if (many := launches.many) is not None:
        hopper = launches.beside is None and rounded_by is None and many.queries == prompt_tiles.QUERIES
        if hopper and prompt_tiles.serves(q, fresh, cache, step, spec):
            prompt_tiles.attend(q, cache, step, spec, many.tiles, out.values)
        else:
            with _forked(launches.beside):
                _attend_many(q, fresh, cache, scales, step, spec, many, out, sinks)
    if launches.few is not None:
        attend_few(q, cache, scales, step, spec, launches.few, out, sinks)
    if launches.beside is not None:
        torch.cuda.current_stream(q.device).wait_stream(launches.beside)
    return out.values


def _attend_many(
    q: Tensor,
    fresh: Tensor | None,
    cache: Tensor,
    scales: Tensor | None,
    step: StepInput,
    spec: AttentionSpec,
    many: Many,
    out: Output,
    sinks: Tensor | None,
) -> None:
    form, cells = as_words(cache)
    shape = prefill_shape(q.dtype, spec.head_dim, many.longest, q.device)._replace(queries=many.queries)
    bulk = fresh is not None and shape.bulk
    prefill_kernel[(spec.num_heads, many.count)](
        q,
        q if fresh is None else fresh,
        _tiles(fresh, shape.keys) if bulk and fresh is not None else q,
        cells,
        step.seq_lens if scales is None else scales,
        *out.arguments(),
        many.tiles,
        step.query_start,
        step.seq_lens,
        step.query_start if step.table_rows is None else step.table_rows,
        step.block_tables,
        *scales_of(spec),
        *head_terms(spec, sinks, step.seq_lens),
        step.seq_lens if step.unseen is None else step.unseen,
        step.seq_lens if step.ahead is None else step.ahead,
        *two_strides(q),
        *cells.stride()[:4],
        step.block_tables.stride(0),
        GROUP=spec.num_heads // spec.num_kv_heads,
        KV_HEADS=spec.num_kv_heads,
        D=spec.head_dim,
        BLOCK_D=tile_width(spec.head_dim, form),
        BLOCK_M=shape.queries,
        BLOCK_N=shape.keys,
        PAGE=cache.shape[3],
        WINDOW=spec.window or 0,
        CHUNKED=spec.chunked,
        CAPPED=spec.soft_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=spec.slopes is not None,
        BRANCHES=step.unseen is not None,
        AHEAD=step.ahead is not None,
        HAS_TABLE_ROWS=step.table_rows is not None,
        HAS_FRESH=fresh is not None,
        BULK=bulk,
        ROUNDED=out.inverse is not None,
        FORM=form,
        MEANS=means_of(q.device),
        num_warps=shape.warps,
        num_stages=shape.stages,
        maxnreg=shape.registers,
    )


def _tiles(fresh: Tensor, keys: int) -> TensorDescriptor:
    """Return the descriptor of the step's keys and values for the copy engine, in tiles of `keys` tokens of one
    head."""
    tokens, heads, dim = fresh.shape
    return TensorDescriptor(fresh, [tokens, heads * dim], [fresh.stride(0), 1], [keys, dim])


@contextmanager
def _forked(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run launches of the block on this stream, after earlier launches of the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None
