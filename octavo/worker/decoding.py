"""`Decoding`: steps in which every row computes one token and samples the next, by a single native call.

What a step does in Python costs more than its instructions: the weights have just gone through the processor's caches,
so every object touched comes from memory. Here nothing is touched that does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.core.output import StepOutput
from octavo.core.plan import StepPlan
from octavo.models.native import NativeDecoder
from octavo.native.bindings import Decode
from octavo.sampling.allowed import Allowed
from octavo.worker.slots import Ints, Slots


@dataclass(slots=True)
class DecodeStep:
    """A step that is computed, with the tokens that were sampled, should no feature change the logits.

    Attributes:
        logits: [S, vocab] float32, until the next step.
        chosen: [S] int64, until the next step.
        flawed: rows without a finite largest logit.
        failed: row -> why a feature ends its request.
    """

    plan: StepPlan
    logits: Tensor
    chosen: Ints
    flawed: list[int]
    failed: Mapping[int, str]
    output: StepOutput | None = None

    def result(self) -> StepOutput:
        if self.output is None:
            raise AssertionError("the step was never sampled")
        return self.output


class Decoding:
    """The model's steps of one token a row."""

    def __init__(self, model: NativeDecoder, slots: Slots, block_size: int) -> None:
        self._model = model
        self._slots = slots
        count = len(slots.length)
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
            table_stride=slots.block_tables.shape[1],
            block_size=block_size,
        )
        self._results: tuple[Tensor, Ints] = torch.empty(0), self._chosen
        self._laid_out = False
        self._adoptions = 0

    def takes(self, plan: StepPlan) -> bool:
        """Return True if the plan is such a step, and lay it out, unless it repeats one that is laid out.

        Ask for every plan, once the slots have taken it in.
        """
        kept = plan.repeats and self._laid_out and self._adoptions == self._model.adoptions
        self._laid_out = kept and not plan.needs_feedback
        if self._laid_out:
            return True
        count = len(plan.slots)
        if plan.num_tokens != [1] * count or not all(plan.samples) or plan.needs_feedback:
            return False
        params = self._slots.params(plan.slots)
        if not all(one is not None and one.logprobs is None for one in params):
            return False
        if self._slots.reports(plan.slots):
            return False
        self._rows[:count] = plan.slots
        self._batch.count = count
        self._results = self._model.lay_out(self._batch), self._chosen[:count]
        self._laid_out, self._adoptions = True, self._model.adoptions
        return True

    def forward(self, plan: StepPlan, allowed: Allowed | None) -> DecodeStep:
        """Compute the step and append its tokens, among the `allowed` ones of its rows, to the slots."""
        count = self._batch.count
        masks = None if allowed is None else allowed.addresses(count)
        self._batch.allowed = None if masks is None else masks.ctypes.data
        flawed = self._model.decode(self._batch)
        bad = np.flatnonzero(~np.isfinite(self._peaks[:count])).tolist() if flawed else []
        return DecodeStep(plan, *self._results, bad, {} if allowed is None else allowed.errors)
