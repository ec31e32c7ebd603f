"""`PromptSlots`: the `Slots` of models that keep nothing between steps. Each prompt is computed in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import SampledRow, StepPlan
from octavo.device.transfer import upload
from octavo.nn.step import StepInput
from octavo.worker.drafts import Drafting, Drafts, Following, StoredDrafts
from octavo.worker.parts import Layout
from octavo.worker.step import PromptRow


class PromptSlots:
    """The prompts of the current step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._prompts: dict[int, list[int]] = {}

    def apply(self, plan: StepPlan) -> None:
        self._prompts = {row.slot: row.tokens for row in plan.new}

    def lay_out(self, plan: StepPlan) -> Layout[None]:
        prompts = [self._prompts.get(slot, []) for slot in plan.slots]
        if any(len(tokens) != count for tokens, count in zip(prompts, plan.num_tokens, strict=True)):
            raise AssertionError("the plan has only a part of a prompt, but an encoder needs whole prompts")
        counts = np.asarray(plan.num_tokens, dtype=np.int64)
        ends = counts.cumsum()
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        ids = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in prompts])
        lengths = upload(counts.astype(np.int32), self._device)
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        batch = StepInput(
            input_ids=upload(ids, self._device),
            positions=upload(positions, self._device),
            query_start=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=lengths,
            block_tables=nothing.new_empty(len(counts), 0, dtype=torch.int32),
            slot_mapping=nothing,
            logit_rows=nothing,
            max_query_len=int(counts.max()),
            max_seq_len=int(counts.max()),
            query_lens=plan.num_tokens,
        )
        return Layout(batch, nothing, None)

    def learn(self, sampled: Sequence[SampledRow]) -> None:
        raise AssertionError("an encoder samples no tokens")

    def prompt_rows(self, plan: StepPlan) -> list[PromptRow]:
        return []

    def advance(self, plan: StepPlan, layout: Layout[Any]) -> None:
        """Do nothing: no state is kept."""

    def drafting(self, plan: StepPlan) -> Drafting:
        raise AssertionError("an encoder samples no tokens")

    def follow(self, where: Following) -> None:
        raise AssertionError("an encoder keeps no tokens")

    def tables_of(self, slots: Tensor) -> Tensor:
        raise AssertionError("an encoder keeps no blocks")

    def known(self) -> tuple[Tensor, Tensor]:
        raise AssertionError("an encoder keeps no tokens")

    def draft(self, drafting: Drafting, drafts: Drafts | None) -> Callable[[], StoredDrafts]:
        raise AssertionError("an encoder samples no tokens")
