"""`StepPlan`: all that a worker needs for one step, and the layout of its batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.params import SamplingParams


class NewRow(msgspec.Struct, frozen=True):
    """A request that takes a slot with this step: newly admitted, or resumed after a preemption.

    Attributes:
        slot: the worker's slot that it gets.
        tokens: all tokens known so far (prompt and, on resume, output).
        num_prompt: number of prompt tokens among them.
        params: its sampling parameters.
        seed: seed of its sampling: the user's, or a random one.
        stop_ids: tokens that end it; not sampled before `params.min_tokens`.
        num_computed: positions whose KV is already in `blocks` (a prefix hit).
        blocks: its block table for each cache group, including the blocks that this step writes; -1 where a group keeps
            no block.
        options: the features' own options, as in `GenerateRequest`.
        raw_logprobs: report log-probabilities of the raw logits, regardless of the engine's `logprobs_mode`.
        rank: the rank that has the blocks and computes the request's rows of the layers; -1 if every rank has a share
            of each block.
        added_tokens: as in `GenerateRequest`.
    """

    slot: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    num_computed: int
    blocks: list[list[int]]
    options: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    raw_logprobs: bool = False
    rank: int = -1
    added_tokens: int = 0


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Pages to move between KV blocks and a tier, under one ticket. A page is the content of one block.

    Attributes:
        ticket: its number, never used again by this engine.
        tier: name of the feature that keeps the pages.
        pages: their names; see `cache/tier.py`.
        blocks: the block of each page.
    """

    ticket: int
    tier: str
    pages: list[bytes]
    blocks: list[int]


class Transfers(msgspec.Struct, frozen=True):
    """Transfers to begin before a step. The step does not wait for them: it uses no block that is being loaded, and
    writes to none that is being stored.

    Attributes:
        loads: from a tier into blocks.
        stores: from blocks to a tier. The steps that filled the blocks have run.
        doubted: tickets of earlier plans that the worker may never have seen; it reports those that it does not know.
    """

    loads: list[Transfer] = []
    stores: list[Transfer] = []
    doubted: list[int] = []


class SampledRow(msgspec.Struct, frozen=True, array_like=True):
    """What a row of an earlier step sampled, for ranks that do not sample.

    Attributes:
        tokens: those that were kept, at least one.
        num_drafts: drafts that the row computed. Those without a token here, the last ones, were rejected.
        drafts: proposed after the tokens, for the slot's next row.
    """

    slot: int
    tokens: list[int]
    num_drafts: int = 0
    drafts: list[int] = []

    @property
    def num_rejected(self) -> int:
        return 1 + self.num_drafts - len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True):
    """One planned step. The order and counts of its rows *are* the layout: scheduler and worker both read them.

    Row i computes `num_tokens[i]` tokens of slot `slots[i]`, the last `num_drafts[i]` of them drafts, and yields
    `1 + num_drafts[i]` consecutive rows of logits if `samples[i]`, else none. Rows that decode come first. A row may
    have fewer drafts than counted: the rest of its tokens is padding, computed but never accepted.

    Attributes:
        id: counts up from 0.
        new: requests that take a slot, applied before anything else.
        slots, num_tokens, num_drafts, samples: the rows, as parallel lists.
        block_writes: (slot, group, index, block) changes of block tables, applied after `new`, which has whole tables.
        copies: (source, destination) blocks, copied before this step writes any KV.
        payload: feature name -> input of its worker half for this step.
        needs_feedback: the rows can't be sampled before the previous step's tokens are known on the host.
        repeats: the rows equal those of the previous plan, which was launched, and `new` is empty; a worker may reuse
            its layout. Never set on the first plan after a failed step.
        proposals: row -> the most drafts to propose after its tokens, for sampling rows that get drafts.
        reports_drafts: the step's output must have the drafts themselves: a feature's engine half reads them.
        transfers: blocks to load and to store; None for none. A plan without rows has nothing else: it begins
            transfers, or asks for their reports, while nothing is computed.
        sampled: rows of earlier steps, taken in before anything else by ranks that did not sample them.
    """

    id: int
    new: list[NewRow]
    slots: list[int]
    num_tokens: list[int]
    num_drafts: list[int]
    samples: list[bool]
    block_writes: list[tuple[int, int, int, int]]
    copies: list[tuple[int, int]]
    payload: dict[str, Any] = msgspec.field(default_factory=dict)
    needs_feedback: bool = False
    repeats: bool = False
    proposals: dict[int, int] = msgspec.field(default_factory=dict)
    transfers: Transfers | None = None
    sampled: list[SampledRow] = []
    reports_drafts: bool = False

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def logit_slots(self) -> list[int]:
        """The slot of each row of logits, in their order."""
        if not any(self.num_drafts):
            return [slot for slot, samples in zip(self.slots, self.samples, strict=True) if samples]
        rows = zip(self.slots, self.num_drafts, self.samples, strict=True)
        return [slot for slot, drafts, samples in rows if samples for _ in range(1 + drafts)]


@dataclass(slots=True)
class PlanDraft:
    """A mutable `StepPlan`, with the same fields."""

    new: list[NewRow] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    block_writes: list[tuple[int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    payload: dict[str, Any] = field(default_factory=dict)
    needs_feedback: bool = False
    repeats: bool = False
    proposals: dict[int, int] = field(default_factory=dict)
    reports_drafts: bool = False
    transfers: Transfers | None = None

    def freeze(self, step_id: int) -> StepPlan:
        return StepPlan(
            id=step_id,
            new=self.new,
            slots=self.slots,
            num_tokens=self.num_tokens,
            num_drafts=self.num_drafts,
            samples=self.samples,
            block_writes=self.block_writes,
            copies=self.copies,
            payload=self.payload,
            needs_feedback=self.needs_feedback,
            repeats=self.repeats,
            proposals=self.proposals,
            reports_drafts=self.reports_drafts,
            transfers=self.transfers,
        )
