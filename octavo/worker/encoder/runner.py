"""`EncoderRunner`: one step of an encoder. Its results are what features make of the hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.core.output import StepOutput
from octavo.core.plan import StepPlan
from octavo.core.spans import Spans
from octavo.device.transfer import upload
from octavo.models.model import EncoderModel, watch_model
from octavo.nn.attention.whole import groups_of
from octavo.nn.step import StepInput
from octavo.worker.hooks import Findings, Hooks, WorkerHook, gather


@dataclass(slots=True)
class EncoderStep:
    """A step on its way."""

    plan: StepPlan
    findings: dict[str, Findings]

    def result(self) -> StepOutput:
        """Wait for what was found."""
        found, errors = gather(self.findings)
        return StepOutput([[] for _ in self.plan.slots], errors=errors, found=found)


class EncoderRunner:
    """A model behind the `Executor` protocol. It needs no slots: a prompt comes with the step that computes it."""

    def __init__(self, model: EncoderModel, device: torch.device, hooks: Sequence[WorkerHook] = ()) -> None:
        self._model = model
        self._device = device
        self._hooks = Hooks(hooks)
        self._hooks.attach(model)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> EncoderStep:
        self._hooks.add(plan.new)
        step = self._lay_out(plan)
        self._hooks.before_forward(step, plan.payload)
        hidden = self._model.forward(self._model.embed(step), step)
        return EncoderStep(plan, self._hooks.after_forward(hidden, plan.payload))

    def sample(self, step: EncoderStep, payload: dict[str, Any]) -> None:
        """There is nothing to sample."""

    def watch(self, spans: Spans) -> None:
        """Have a profile see what a step consists of."""
        watch_model(spans, self._model)

    def close(self) -> None:
        """The model goes with the runner."""

    def _lay_out(self, plan: StepPlan) -> StepInput:
        tokens = {row.slot: row.tokens for row in plan.new}
        if any(len(tokens[slot]) != count for slot, count in zip(plan.slots, plan.num_tokens, strict=True)):
            raise AssertionError("an encoder was given a part of a prompt")
        counts = np.asarray(plan.num_tokens, dtype=np.int64)
        ends = counts.cumsum()
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        ids = np.concatenate([np.asarray(tokens[slot], dtype=np.int64) for slot in plan.slots])
        lengths = upload(counts.astype(np.int32), self._device)
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        return StepInput(
            input_ids=upload(ids, self._device),
            positions=upload(positions, self._device),
            query_start=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=lengths,
            block_tables=nothing.new_empty(len(counts), 0, dtype=torch.int32),
            slot_mapping=nothing,
            logit_rows=nothing,
            max_query_len=int(counts.max()),
            max_seq_len=int(counts.max()),
            attn=groups_of(plan.num_tokens, self._device),
        )
