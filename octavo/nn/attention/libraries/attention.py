"""Attention of prompts by a library; cache, decoding and graphs are Octavo's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.device.transfer import upload
from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.libraries.prompts import PromptLibrary, Prompts
from octavo.nn.attention.triton import Launches, TritonAttention, rotate_and_write
from octavo.nn.attention.triton_arguments import Output
from octavo.nn.attention.triton_few import Few, attend_few
from octavo.nn.step import StepInput


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The parts of one step's attention: Octavo's kernel for rows with few queries, the library for the others."""

    few: Few | None
    prompts: Prompts | None


class LibraryAttention:
    """Rows with many queries, and rows between the first and the last of them, go to the library.

    All others, including all recorded steps, run in Octavo's own kernels, which also store keys and values.

    Attributes:
        own: Octavo's kernels.
    """

    follows_table_rows = True

    def __init__(self, library: PromptLibrary, own: TritonAttention) -> None:
        self.name = library.name
        self.own = own
        self._library = library

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return self.own.cache_shape(spec, num_blocks, block_size)

    def prepare(self, step: StepInput, block_size: int) -> SplitPlan | Launches:
        """Divide the rows. Reads nothing from the device if `step` has `query_lens` and `past_lens`."""
        if (few := self.own.all_few(step)) is not None:
            return SplitPlan(few, None)
        if step.unseen is not None or step.ahead is not None:
            return self.own.prepare(step, block_size)  # libraries see all keys before a query, and none after it
        counts = np.asarray(step.query_lens or step.query_start.diff().tolist(), dtype=np.int32)
        if step.past_lens is not None:
            lengths = counts + np.asarray(step.past_lens, dtype=np.int32)
        else:
            lengths = np.asarray(step.seq_lens.tolist(), dtype=np.int32)
        many = np.flatnonzero(counts > 1)
        first, last = int(many[0]), int(many[-1]) + 1
        single = np.setdiff1d(np.arange(len(counts), dtype=np.int32), np.arange(first, last))
        begin = int(counts[:first].sum())
        query_start = step.query_start[first : last + 1]
        prompts = Prompts(
            step,
            first,
            last,
            counts[first:last],
            lengths[first:last],
            begin,
            query_start - begin if begin else query_start,
        )
        return SplitPlan(Few(upload(single, step.device), len(single), 1) if len(single) else None, prompts)

    def widen(self, queries: int) -> int:
        """See `BranchingBackend`."""
        return self.own.widen(queries)

    def move(self, caches: Tensor, sources: Tensor, targets: Tensor) -> None:
        """See `BranchingBackend`."""
        self.own.move(caches, sources, targets)

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        self.own.write(k, v, cache, step)

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
        """See `FusedBackend`. Results of a library are not rounded."""
        assert sinks is None, "libraries are not chosen for layers with sinks"
        if isinstance(step.attn, Launches):
            return self.own.rotate_and_attend(qkv, norms, cos_sin, cache, scales, step, spec, None, rounded_by)
        rotate_and_write(qkv, norms, cos_sin, cache, scales, step, kept=False)
        return self._attend(qkv[:, : spec.num_heads], cache, step, spec, rounded_by)

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
        assert sinks is None, "libraries are not chosen for layers with sinks"
        if isinstance(step.attn, Launches):
            return self.own.attend(q, cache, step, spec)
        return self._attend(q, cache, step, spec, None)

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
        assert scales is None, "libraries are not chosen for FP8 caches"
        return self.attend(q, cache, step, spec, sinks)

    def _attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, rounded_by: Tensor | None
    ) -> Tensor:
        parts: SplitPlan = step.attn
        if parts.few is None and parts.prompts is not None:
            return self._library.attend(q, cache, parts.prompts, spec)
        out = Output.of(q, rounded_by if parts.prompts is None else None)
        if parts.few is not None:
            attend_few(q, cache, None, step, spec, parts.few, out)
        if parts.prompts is not None:
            tokens = parts.prompts.tokens
            out.values[tokens] = self._library.attend(q[tokens], cache, parts.prompts, spec)
        return out.values

    @property
    def most_few(self) -> int:
        """See `FusedBackend`. Steps with drafts are divided as others are."""
        return 0

    def cut(self, lens: np.ndarray, past: Sequence[int], device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """See `FusedBackend`. A library's work can't be recorded."""
        return self.own.cut(lens, past, device)

    def most_tiles(self, tokens: int, rows: int, device: torch.device) -> int:
        """See `FusedBackend`."""
        return self.own.most_tiles(tokens, rows, device)

    def sharing(self) -> tuple[int, int]:
        """See `FusedBackend`."""
        return self.own.sharing()

    def foreseen(self, tiles: Tensor, single: Tensor, longest: int) -> Launches:
        """See `FusedBackend`."""
        return self.own.foreseen(tiles, single, longest)

    def peaks(self, cache: Tensor) -> Tensor:
        """See `FusedBackend`."""
        return self.own.peaks(cache)
