"""`StepBuilder`: the rows of the next plan and the scheduler's notes while it adds them."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from octavo.cache.table import Growth
from octavo.core.plan import NewRow, PlanDraft
from octavo.schedule.policy import Pace
from octavo.schedule.queue import Rank
from octavo.schedule.request import Request


class AdmitResult(enum.Enum):
    """Result of an attempt to admit a request."""

    DONE = enum.auto()
    WAIT = enum.auto()  # this request must wait; others may pass it
    FULL = enum.auto()  # no room; no other request may pass it


@dataclass(slots=True)
class StepBuilder:
    """The layout so far, the requests behind its rows, and the remaining budget in tokens."""

    budget: int
    of_ranks: list[int] = field(default_factory=list)
    """The remaining budget of each rank whose requests are its own; empty if each rank computes all requests."""
    rank_is_full: bool = False
    """The first waiting request's rank has no budget left."""
    draft: PlanDraft = field(default_factory=PlanDraft)
    rows: list[Request] = field(default_factory=list)
    prompts: set[Request] = field(default_factory=set)
    """Requests whose prompt blocks this step may still have to write: it computes part of the prompt, or admits the
    request. Their blocks can't be copied, since copies come before all writes of the step."""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    """All tokens of the step, and those of prompts."""
    starved: Rank | None = None
    """The best rank that got no blocks. Free blocks are kept for it: no request that ranks after it gets a row."""
    yielding: set[Request] = field(default_factory=set)
    """Requests that get no row, so that they soon have nothing in flight and can be preempted."""
    pace: Pace | None = None
    """Limits the prompt tokens of the step; None for no limit."""
    deferred: list[Request] = field(default_factory=list)
    """Taken from the queue, and to go back to it: they wait for something else than room."""
    unsent: Collection[str] = ()
    """Features whose options stay in the engine core."""

    @classmethod
    def empty(cls, tokens: int, ranks: int, unsent: Collection[str] = ()) -> StepBuilder:
        """Return a step without rows.

        Args:
            tokens: budget; of each rank, if several have requests of their own.
        """
        return cls(tokens * ranks, [tokens] * ranks if ranks > 1 else [], unsent=unsent)

    def left_for(self, request: Request) -> int:
        """Return the tokens left for a request whose rank is chosen."""
        return min(self.budget, self.of_ranks[request.table.rank]) if self.of_ranks else self.budget

    def add_row(self, request: Request, num_tokens: int, growth: Growth, *, samples: bool, drafts: int) -> None:
        """Add a row for the next `num_tokens` of a request. `request.num_computed` does not include them yet."""
        draft = self.draft
        draft.slots.append(request.slot)
        draft.num_tokens.append(num_tokens)
        draft.num_drafts.append(drafts)
        draft.samples.append(samples)
        if growth.writes:  # most rows begin no block
            draft.copies.extend(growth.copies)
            draft.block_writes.extend((request.slot, *write) for write in growth.writes)
        self.rows.append(request)
        self.num_tokens += num_tokens
        self.budget -= num_tokens
        if self.of_ranks:
            self.of_ranks[request.table.rank] -= num_tokens
        if request.num_computed < request.num_prompt:
            self.prompts.add(request)
            self.num_prompt_tokens += min(num_tokens, request.num_prompt - request.num_computed)

    def add_new(self, request: Request, num_computed: int) -> None:
        """Add the `NewRow` of a request that fills a slot; the KV of its first `num_computed` positions is computed."""
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
            options={name: one for name, one in request.spec.options.items() if name not in self.unsent},
            raw_logprobs=request.siblings.lockstep is not None,
            rank=request.table.rank,
            added_tokens=request.spec.added_tokens,
        )
        self.draft.new.append(row)
