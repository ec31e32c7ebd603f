"""`NativeReplay`: steps of one token per row, from embedding to sampled token in a single native call.

Python work costs more than its instructions here: the weights have just evicted the processor's caches, so every object
is read from memory. Therefore only objects that change are touched.
"""

from __future__ import annotations

from collections.abc import Collection

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
    """A `Replay` that also samples: the kernels read slots and masks themselves."""

    draws = True

    def __init__(self, model: NativeDecoder, slots: HostSlots, variants: Collection[Variant] = (ORDINARY,)) -> None:
        """
        Args:
            variants: those that it takes.
        """
        self.count = 0
        self._variants = frozenset(variants)
        self._variant = ORDINARY
        self._model = model
        self._slots = slots
        count = slots.num_slots
        self._rows = np.empty(count, dtype=np.int64)
        self._chosen = np.empty(count, dtype=np.int64)
        self._peaks = np.empty(count, dtype=np.float32)
        self._batch = Decode(
            tokens=slots.tokens.ctypes.data,
            length=slots.length.ctypes.data,
            computed=slots.computed.ctypes.data,
            block_tables=slots.block_tables.ctypes.data,
            sampling=slots.sampling.ctypes.data,
            slots=self._rows.ctypes.data,
            chosen=self._chosen.ctypes.data,
            peaks=self._peaks.ctypes.data,
            token_stride=slots.tokens.shape[1],
            table_stride=slots.block_tables.shape[2],
            group_stride=slots.block_tables[0].size,
            block_size=slots.block_size,
            groups=len(slots.block_tables),
        )
        self._results: tuple[Tensor, Ints, NDArray[np.float32]] = torch.empty(0), self._chosen, self._peaks
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
        if plan.needs_feedback or variant not in self._variants:
            return False
        if kept:
            self._laid_out = True
            return True
        count = len(plan.slots)
        if plan.num_tokens != [1] * count or not all(plan.samples):
            return False
        if not all(one is not None and one.logprobs is None for one in self._slots.params(plan.slots)):
            return False
        self._rows[:count] = plan.slots
        self._batch.count = count
        self._results = self._model.lay_out(self._batch), self._chosen[:count], self._peaks[:count]
        self._laid_out, self._adoptions = True, self._model.adoptions
        return True

    def forward(self, step: Step, allowed: Allowed | None) -> None:
        """Compute the step and append its tokens to the slots."""
        batch = self._batch
        masks = None if allowed is None else allowed.addresses(batch.count)
        batch.allowed = None if masks is None else masks.ctypes.data
        flawed = self._model.decode(batch)
        _, chosen, peaks = self._results
        tokens = chosen.tolist()
        if flawed:
            for row in np.flatnonzero(~np.isfinite(peaks)).tolist():
                tokens[row] = -1
        step.drawn = DrawnHere(tokens)
        if allowed is not None:
            step.failed = allowed.errors
        step.rows = step.plan.slots
        self.count += 1

    def sample(self, step: Step, allowed: Allowed | None) -> Drawn | None:
        return None

    def retract(self, step: Step) -> Tensor:
        self._slots.retract(step.rows)
        return self._results[0]

    def watch(self, spans: Spans) -> None:
        spans.watch(Watched(self, "forward", "decode"))
        self._model.watch(spans)

    def close(self) -> None:
        self._model.forget_caches()
