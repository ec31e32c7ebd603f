"""`Request`: the scheduler's state of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.cache.table import BlockTable
from octavo.core.output import FinishReason
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest

if TYPE_CHECKING:
    from octavo.schedule.siblings import Siblings


@dataclass(slots=True, eq=False)
class Request:
    """One of the sequences of a `GenerateRequest` (its choices, or beams). Only the scheduler changes it.

    The counters are upper bounds: the device may have rejected drafts that the host still counts, and tokens that are
    being sampled (`pending`) have no value here yet.
    """

    spec: GenerateRequest
    index: int
    order: int
    """Arrival number, unique; the last tie-breaker of every policy."""
    tokens: list[int]
    """Prompt and output, as far as known."""
    max_tokens: int
    """Most tokens to sample; 0 for a request that ends with its prompt."""
    stop_ids: frozenset[int]
    """Tokens that end it: the model's end-of-sequence tokens, unless ignored, and the request's own."""
    seed: int
    table: BlockTable
    siblings: Siblings
    """All sequences of the request, this one included."""
    namespace: str = ""
    """It shares KV only within this namespace, which is set each time its prefix is looked up."""
    marks: Sequence[tuple[int, bytes]] = ()
    """Prompt positions from which on its KV depends on more than the namespace, and on what; set likewise."""
    turn: int = 0
    """Set by the policy when it arrives, for those that order requests by more than their arrival."""
    num_computed: int = 0
    """Positions whose KV is written once all launched steps have run."""
    pending: int = 0
    """Upper bound on tokens that launched steps will append."""
    num_drafts: int = 0
    """Upper bound on draft tokens held by the device after the last known or pending token."""
    unsure: int = 0
    """Drafts in launched steps: upper bound on what commits will take back from `num_computed` and `pending`."""
    inflight: int = 0
    """Launched steps that hold a row of this request."""
    slot: int = -1
    """The worker's row for this request while it runs; -1 while it waits."""
    finish: FinishReason | None = None
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache (or from choice 0) at the first admission."""
    num_preemptions: int = 0
    num_lost: int = 0
    """Positions that were computed before the last preemption."""
    first_scheduled: float = 0.0
    first_token: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    """Engine-half state of features, keyed by feature name."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def params(self) -> SamplingParams:
        return self.spec.params

    @property
    def num_prompt(self) -> int:
        return len(self.spec.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.spec.tokens)

    @property
    def keys(self) -> Sequence[int | bytes]:
        """What identifies its tokens in the KV cache. Those behind a mark are only found behind it."""
        keys = [*self.spec.keys, *self.tokens[self.num_prompt :]] if self.spec.keys else self.tokens
        if self.marks:
            keys = list(keys)
            for position, mark in self.marks:
                keys[position] = mark + repr(keys[position]).encode()
        return keys

    @property
    def reads_cache(self) -> bool:
        """Whether it may use KV that other requests computed."""
        return self.spec.reads_cache and self.params.prompt_logprobs is None

    def unbroken_at(self, end: int) -> tuple[int, int] | None:
        """Return the range of its prompt that a step which ends at position `end` would cut, though it must not."""
        return next((each for each in self.spec.unbroken if each[0] < end < each[1]), None)

    @property
    def uncomputed(self) -> int:
        """The one number that drives scheduling: prefill, chunk, decode, draft check, resume and prefix hit alike."""
        return len(self.tokens) + self.pending + self.num_drafts - self.num_computed

    @property
    def certain_to_finish(self) -> bool:
        """Whether the launched steps complete it, so that no further step is needed."""
        if not self.max_tokens:
            return not self.uncomputed
        return self.num_output + self.pending >= self.max_tokens
