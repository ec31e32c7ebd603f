"""`Slots`, `Replay`, `Sampler`: the three parts of a runner that each kind of device implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.core.plan import SampledRow, StepPlan
from octavo.core.spans import Spans
from octavo.nn.step import StepInput
from octavo.sampling.allowed import Allowed
from octavo.sampling.drawn import Drawn
from octavo.worker.drafts import Drafting, Drafts, Following, StoredDrafts
from octavo.worker.hooks import Variant
from octavo.worker.step import PromptRow, Step

B = TypeVar("B")

Forward = Callable[[Tensor, StepInput], Tensor]
"""A model's layers: embeddings [T, hidden_size] to hidden states; see `CausalLM.forward`."""


class Prepares(Protocol):
    """The part of an attention backend that runs once per step."""

    def prepare(self, step: StepInput, block_size: int) -> object:
        """Return the value of `step.attn`."""
        ...


@dataclass(slots=True)
class Layout(Generic[B]):
    """A plan laid out as a batch.

    Attributes:
        input: the model's input.
        rows: the slots of the rows that get logits, in the sampler's form.
        batch: the rows, in the form of `Slots.advance`.
    """

    input: StepInput
    rows: Any
    batch: B


class Slots(Protocol):
    """The state of running requests, one fixed row each: tokens, positions computed, block tables, sampling."""

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes: requests that took a slot, then changed block tables."""
        ...

    def learn(self, sampled: Sequence[SampledRow]) -> None:
        """Take in what another rank sampled: append the tokens, forget the rejected drafts, store the new ones."""
        ...

    def lay_out(self, plan: StepPlan) -> Layout[Any]:
        """Lay out the plan's rows consecutively, each from the first position that its slot has not computed."""
        ...

    def prompt_rows(self, plan: StepPlan) -> list[PromptRow]:
        """Return the rows that compute part of a prompt with requested log-probabilities. Call before `advance`."""
        ...

    def advance(self, plan: StepPlan, layout: Layout[Any]) -> None:
        """Count the plan's tokens as computed, drafts included."""
        ...

    def drafting(self, plan: StepPlan) -> Drafting:
        """Return the rows that get drafts. Call after the plan's tokens were appended."""
        ...

    def draft(self, drafting: Drafting, drafts: Drafts | None) -> Callable[[], StoredDrafts]:
        """Store drafts for the next step, cut to their limits and to the vocabulary.

        Returns:
            Function that waits for what was stored.
        """
        ...

    def follow(self, where: Following) -> None:
        """Continue these slots elsewhere: take over their last tokens, lengths and computed positions."""
        ...

    def tables_of(self, slots: Tensor) -> Tensor:
        """Return the block tables of these slots [D] int64 in the first group, [D, blocks] int32, on the device."""
        ...

    def known(self) -> tuple[Tensor, Tensor]:
        """Return the tokens [slots, max_model_len] and their number [slots], on the device; not to be changed."""
        ...


class Sampler(Protocol):
    """Samples tokens and appends them to their slots."""

    def sample(self, logits: Tensor, step: Step, allowed: Allowed | None) -> Drawn:
        """Sample a token for each row of logits, and append those that are kept.

        Args:
            logits: [S, vocab], of the step's `rows`; may be overwritten.
            allowed: masks of allowed tokens; None if all are allowed.
        """
        ...

    def num_candidates(self, step: Step) -> int:
        """Return how many of each row's most likely tokens suffice for `sample` without masks; 0 if it needs all."""
        ...

    def prompt(self, row: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], list[TokenLogprobs]]:
        """Compute the log-probabilities of a prompt's tokens; return a function that waits for them.

        Args:
            logits_of: computes logits [n, vocab] from hidden states [n, hidden_size].
        """
        ...

    def watch(self, spans: Spans) -> None:
        """Record its work in a profile's spans."""
        ...


class Replay(Protocol):
    """Computes steps that were recorded or compiled beforehand.

    Attributes:
        draws: the forward pass also samples, so masks must be known by then.
        count: steps replayed so far.
    """

    draws: bool
    count: int

    def takes(self, plan: StepPlan, variant: Variant) -> bool:
        """Return whether a recording can compute the plan, which was applied to the slots. `forward` then follows."""
        ...

    def forward(self, step: Step, allowed: Allowed | None) -> None:
        """Compute the step just taken, up to its hidden states, or up to its tokens if the replay `draws`."""
        ...

    def sample(self, step: Step, allowed: Allowed | None) -> Drawn | None:
        """Sample a step's tokens if a recording supports it, else return None. Call before the next `forward`."""
        ...

    def retract(self, step: Step) -> Tensor:
        """Remove the tokens sampled by `forward`. Return the logits [S, vocab] to sample from again."""
        ...

    def watch(self, spans: Spans) -> None:
        """Record its work in a profile's spans."""
        ...

    def close(self) -> None:
        """Drop all recordings; the KV cache was freed."""
        ...


class NoReplay:
    """A `Replay` without recordings."""

    draws = False
    count = 0

    def takes(self, plan: StepPlan, variant: Variant) -> bool:
        return False

    def forward(self, step: Step, allowed: Allowed | None) -> None:
        raise AssertionError("nothing is recorded")

    def sample(self, step: Step, allowed: Allowed | None) -> Drawn | None:
        return None

    def retract(self, step: Step) -> Tensor:
        raise AssertionError("nothing is recorded")

    def watch(self, spans: Spans) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class NoSampler:
    """The `Sampler` of models without logits."""

    def sample(self, logits: Tensor, step: Step, allowed: Allowed | None) -> Drawn:
        raise AssertionError("the model has no logits")

    def num_candidates(self, step: Step) -> int:
        return 0

    def prompt(self, row: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], list[TokenLogprobs]]:
        raise AssertionError("the model has no logits")

    def watch(self, spans: Spans) -> None:
        """Do nothing."""
