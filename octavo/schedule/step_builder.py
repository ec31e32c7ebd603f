"""`StepBuilder`: collects the rows of the next plan, and what the scheduler notes while it does."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.cache.cache import Growth
from octavo.core.plan import NewRow, PlanDraft
from octavo.schedule.policy import Pace, Rank
from octavo.schedule.request import Request


class Admission(enum.Enum):
    """What became of an attempt to admit a request."""

    DONE = enum.auto()
    WAIT = enum.auto()  # others may pass
    FULL = enum.auto()  # nobody may


@dataclass(slots=True)
class StepBuilder:
    """The layout so far, the requests behind its rows, and what the rows left."""

    budget: int
    draft: PlanDraft = field(default_factory=PlanDraft)
    rows: list[Request] = field(default_factory=list)
    prompts: set[Request] = field(default_factory=set)
    """Requests whose prompt this step computes, in whole or in part, or finds where this step may have yet to write it:
    those that it admits. Nobody can copy a block of theirs, for copies come before all that the step writes."""
    num_prompt_tokens: int = 0
    """Tokens of prompts among those of the step."""
    starved: Rank | None = None
    """The best rank that found no room: whatever becomes free is for it, so nothing ranked after it gets a row."""
    yielding: set[Request] = field(default_factory=set)
    """Get no row, so that they have nothing in flight soon and can be preempted."""
    pace: Pace | None = None
    """Holds prompts up, if it is there."""
    deferred: list[Request] = field(default_factory=list)
    """Taken from the queue, and to go back to it: they wait for something else than room."""

    def add_row(self, request: Request, num_tokens: int, growth: Growth, *, samples: bool, drafts: int) -> None:
        """Lay out the next `num_tokens` of a request, of which `num_computed` does not know yet."""
        draft = self.draft
        draft.slots.append(request.slot)
        draft.num_tokens.append(num_tokens)
        draft.num_drafts.append(drafts)
        draft.samples.append(samples)
        draft.copies.extend(growth.copies)
        draft.block_writes.extend((request.slot, *write) for write in growth.writes)
        self.rows.append(request)
        self.budget -= num_tokens
        if request.num_computed < request.num_prompt:
            self.prompts.add(request)
            self.num_prompt_tokens += min(num_tokens, request.num_prompt - request.num_computed)

    def add_new(self, request: Request, num_computed: int) -> None:
        """Tell the worker of a request that took a slot or fills it anew, with the KV of so many positions there."""
        self.prompts.add(request)
        row = NewRow(
            slot=request.slot,
            tokens=list(request.tokens),
            num_prompt=request.num_prompt,
            params=request.siblings.params,
            seed=request.seed,
            stop_ids=sorted(request.stop_ids),
            num_computed=num_computed,
            blocks=[list(blocks) for blocks in request.table.groups],
            options=request.spec.options,
            raw_logprobs=request.siblings.lockstep is not None,
        )
        self.draft.new.append(row)
