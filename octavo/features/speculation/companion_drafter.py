"""`CompanionDrafter`: what the worker halves have in common if a second model drafts, a whole one or a head.

The model (`Companion`) has slots with the numbers of the target's, and memory of its own for the same KV blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from octavo.core.output import StepOutput
from octavo.core.plan import NewRow, StepPlan
from octavo.features import FeatureContext
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.payload import NAME, option_of
from octavo.features.speculation.reach import Reach
from octavo.worker.companion import Companion
from octavo.worker.drafts import Drafting, Drafts
from octavo.worker.hooks import Site, WorkerHook
from octavo.worker.runner import Runner
from octavo.worker.step import Step


class CompanionDrafter(WorkerHook):
    """Follows the target's slots and block tables; `prepare` and `propose` are its subclasses'."""

    name = NAME
    last_stage_only = True
    _companion: Companion

    def __init__(self, config: DraftConfig, context: FeatureContext) -> None:
        self._config = config
        self._context = context
        self._off: set[int] = set()
        """Slots of requests without drafts."""
        self._running: Runner | None = None

    @property
    def _runner(self) -> Runner:
        assert self._running is not None, "attached before any step"
        return self._running

    def _load(self) -> None:
        """Load the weights, unless `prepare` did."""
        if self._companion.model is None:
            self._companion.load()  # it slept

    def _begin(self, site: Site) -> None:
        """Allocate slots and KV cache, and record steps, for which the model must have all that it reads."""
        assert site.room is not None
        self._load()
        self._running = self._companion.runner(site.blocks.count, site.room)
        self._reach = Reach(site.room.num_slots)
        self._device = site.device
        self._off.clear()

    def detach(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
        self._companion.model = None

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        self._off.discard(slot)
        if not option_of(options).enabled:
            self._off.add(slot)

    def lay_out(self, plan: StepPlan, payload: Any) -> None:
        self._take_over(plan)

    def after_sample(self, plan: StepPlan, output: StepOutput) -> None:
        self._reach.settle(plan, output)

    def _take_over(self, plan: StepPlan) -> list[int]:
        """Apply a plan's changes of slots and block tables; return the rows whose tokens are all known."""
        new = [self._own_row(row) for row in plan.new]
        if new or plan.block_writes or plan.copies:
            self._runner.change(self._companion.changes(plan, new))
        return self._reach.plan(plan)

    def _own_row(self, row: NewRow) -> NewRow:
        """Return a new row of the plan in the form that the model's slots take."""
        raise NotImplementedError

    def _compute(
        self,
        slots: list[int],
        counts: list[int],
        *,
        samples: bool = False,
        draws: bool = True,
        repeats: bool = False,
    ) -> Step:
        """Run a step of the model for these slots and numbers of tokens. If it `samples`, it has the hidden states of
        each slot's last token; if it `draws`, too, the tokens drawn from them are appended."""
        plan = StepPlan(
            id=0,
            new=[],
            slots=slots,
            num_tokens=counts,
            num_drafts=[0] * len(slots),
            samples=[samples] * len(slots),
            block_writes=[],
            copies=[],
            repeats=repeats,
        )
        return self._runner.run(plan) if draws else self._runner.forward(plan)

    def _drafts(self, drafting: Drafting, chosen: list[int], tokens: Tensor) -> Drafts:
        """Return drafts of the `chosen` ones of the drafting rows, and none of the others; `tokens` [D, K]."""
        if len(chosen) == len(drafting.rows):
            return Drafts(tokens, drafting.limits)
        drafted = np.zeros(len(drafting.rows), dtype=np.int64)
        drafted[chosen] = 1
        return Drafts(tokens, drafting.limits * self._device.upload(drafted))


def without_reports(row: NewRow) -> NewRow:
    """Return the row without log-probabilities, which are not read."""
    params = msgspec.structs.replace(row.params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None)
    return msgspec.structs.replace(row, params=params)


def first_part(counts: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of each row to compute first, at most `room` in all; one of each row is left."""
    part = []
    for count in counts:
        part.append(min(count - 1, room))
        room -= part[-1]
    return part
