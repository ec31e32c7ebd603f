"""`NativeReplay`: steps of few tokens per row, and its drafts, from embedding to sampled token in a single native call;
in a stage of a pipeline, from the states of the stage before to those for the next one.

Python work costs more than its instructions here: the weights have just evicted the processor's caches, so every object
is read from memory. Therefore only objects that change are touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.core.spans import Spans, Watched
from octavo.models.native import NativeDecoder
from octavo.native.bindings import Decode
from octavo.sampling.allowed import Allowed
from octavo.sampling.drawn import Drawn, DrawnHere
from octavo.worker.hooks import ORDINARY, Variant
from octavo.worker.slots import HostSlots, Ints
from octavo.worker.step import Step


class NativeReplay:
    """A `Replay` that also samples, unless a later stage does: the kernels read slots and masks themselves.

    Attributes:
        most_behind: most known tokens of a step's rows, besides one of each; all of them are given logits. More than 0
            only where no hook takes part in steps, and drafts are not verified.
    """

    def __init__(self, model: NativeDecoder, slots: HostSlots, variants: Collection[Variant] = (ORDINARY,)) -> None:
        """
        Args:
            variants: those that it takes.
        """
        self.count = self.most_behind = 0
        self.draws = model.samples
        self._variants = frozenset(variants)
        self._variant = ORDINARY
        self._model = model
        self._slots = slots
        count = slots.num_slots
        self._rows, self._drafts, self._kept = np.zeros((3, count), dtype=np.int64)
        self._chosen, self._peaks = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        self._drafted = False
        self._batch = Decode(
            tokens=slots.tokens.ctypes.data,
            length=slots.length.ctypes.data,
            computed=slots.computed.ctypes.data,
            num_drafts=slots.num_drafts.ctypes.data,
            block_tables=slots.block_tables.ctypes.data,
            sampling=slots.sampling.ctypes.data,
            slots=self._rows.ctypes.data,
            drafts=self._drafts.ctypes.data,
            kept=self._kept.ctypes.data,
            token_stride=slots.tokens.shape[1],
            table_stride=slots.block_tables.shape[2],
            group_stride=slots.block_tables[0].size,
            block_size=slots.block_size,
            groups=len(slots.block_tables),
            rewinds=int(slots.rewinds),
            times=1,
        )
        self._make_room(count)
        self._results: tuple[Tensor, Ints, NDArray[np.float32]] = torch.empty(0), self._chosen, self._peaks
        self._before: tuple[Ints, Ints, NDArray[np.int32]] | None = None
        """Lengths of the slots before a step with drafts, [R], and their tokens from there on: places and values."""
        self._last: Ints | None = None
        """[R] each row's last token in the batch; None if rows have no known tokens besides it."""
        self._laid_out = False
        self._adoptions = 0

    def takes(self, plan: StepPlan, variant: Variant) -> bool:
        """Return whether the plan is such a step; if so, lay it out, unless it repeats the step laid out last.

        The model computes the variant from now on, also if the step is not taken.
        """
        kept = plan.repeats and self._laid_out and self._adoptions == self._model.adoptions
        kept = kept and variant == self._variant
        self._laid_out = False
        self._variant = variant
        self._model.select(variant)
        if variant not in self._variants or not self._model.decodes or (self.draws and plan.needs_feedback):
            return False
        if kept:
            self._laid_out = True
            return True
        count, results = len(plan.slots), plan.total_tokens
        behind = results - count - sum(plan.num_drafts)
        if (behind and not self._takes_behind(plan.slots, behind)) or (self.draws and not self._draws_all(plan)):
            return False
        if self._slots.tree is not None and self._slots.tree.branches(plan):
            return False
        self._rows[:count] = plan.slots
        self._drafts[:count] = np.subtract(plan.num_tokens, 1) if behind else plan.num_drafts
        self._drafted = results - behind > count
        self._last = np.cumsum(plan.num_tokens) - 1 if behind else None
        self._make_room(results)
        self._batch.count, self._batch.results = count, results
        self._results = self._model.lay_out(self._batch), self._chosen[:results], self._peaks[:results]
        self._laid_out, self._adoptions = not behind, self._model.adoptions
        return True

    def _takes_behind(self, slots: Sequence[int], behind: int) -> bool:
        """Return whether rows may have this many known tokens besides one of each: of requests that `forward` has
        begun, since it binds the caches."""
        return self.draws and behind <= self.most_behind and bool(self._slots.computed[slots].all())

    def again(self, times: int) -> None:
        """Repeat the step computed last for the tokens that it drew, `times` times in a row. It had one token of each
        row. The results are only in the slots."""
        self._batch.times = times
        try:
            self._model.decode(self._batch)
        finally:
            self._batch.times = 1

    def _draws_all(self, plan: StepPlan) -> bool:
        """Return whether the kernels can draw the tokens of all rows."""
        params = self._slots.params(plan.slots)
        return all(plan.samples) and all(one is not None and one.logprobs is None for one in params)

    def forward(self, step: Step, allowed: Allowed | None) -> None:
        """Compute the step and append its tokens to the slots; before the last stage, up to its hidden states."""
        self.count += 1
        batch = self._batch
        if not self.draws:
            self._model.decode(batch)
            step.hidden = self._results[0]
            return
        masks = None if allowed is None else allowed.addresses(batch.results)
        batch.allowed = None if masks is None else masks.ctypes.data
        self._before = self._drafts_now() if self._drafted else None
        flawed = self._model.decode(batch)
        _, chosen, peaks = self._results
        if self._last is not None:
            chosen, peaks = chosen[self._last], peaks[self._last]
        tokens = chosen.tolist()
        if flawed:
            for row in np.flatnonzero(~np.isfinite(peaks)).tolist():
                tokens[row] = -1
        step.drawn = DrawnHere(tokens, counts=self._kept[: batch.count].tolist() if self._drafted else None)
        if allowed is not None:
            step.failed = allowed.errors
        step.rows = step.plan.slots

    def sample(self, step: Step, allowed: Allowed | None) -> Drawn | None:
        return None

    def retract(self, step: Step) -> Tensor:
        slots, before = self._slots, self._before
        if before is None:
            slots.retract(step.rows)
            return self._results[0]
        length, places, tokens = before
        rows, kept = self._rows[: len(length)], self._kept[: len(length)]
        slots.tokens[rows[:, None], places] = tokens
        slots.length[rows] = length
        computed = 1 + self._drafts[: len(length)]  # of all drafts, rejected ones too
        again = slots.rewinds & (kept < computed)
        slots.computed[rows] += np.where(again, computed, computed - kept)
        step.rows = step.plan.logit_slots
        return self._results[0]

    def _drafts_now(self) -> tuple[Ints, Ints, NDArray[np.int32]]:
        slots, count = self._slots, self._batch.count
        rows = self._rows[:count]
        length = slots.length[rows]
        places = length[:, None] + np.arange(1 + self._drafts[:count].max())
        np.minimum(places, slots.tokens.shape[1] - 1, out=places)
        return length, places, slots.tokens[rows[:, None], places]

    def _make_room(self, results: int) -> None:
        """Allocate results for as many tokens."""
        if len(self._chosen) < results:
            self._chosen, self._peaks = np.empty(results, dtype=np.int64), np.empty(results, dtype=np.float32)
            self._batch.chosen, self._batch.peaks = self._chosen.ctypes.data, self._peaks.ctypes.data

    def watch(self, spans: Spans) -> None:
        spans.watch(Watched(self, "forward", "decode"))
        self._model.watch(spans)

    def close(self) -> None:
        self._model.forget_caches()
