"""`Slots`, `Replay`, `Sampler`: the three parts of a runner that each kind of device brings in its own form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.core.plan import StepPlan
from octavo.core.spans import Spans
from octavo.nn.step import StepInput
from octavo.sampling.allowed import Allowed
from octavo.sampling.drawn import Drawn
from octavo.worker.hooks import Variant
from octavo.worker.step import PromptRow, Step

B = TypeVar("B")


@dataclass(slots=True)
class Layout(Generic[B]):
    """A plan laid out as a batch.

    Attributes:
        input: what the model sees.
        rows: the slots of the rows that get logits, in the form that the sampler takes.
        batch: what `Slots.advance` needs.
    """

    input: StepInput
    rows: Any
    batch: B


class Slots(Protocol):
    """The state of running requests, one fixed row each: tokens, positions computed, block tables, sampling."""

    num_slots: int

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's changes: requests that took a slot, then changed block tables."""
        ...

    def lay_out(self, plan: StepPlan) -> Layout[Any]:
        """Lay the plan's rows out one after the other, each from the first position that its slot has not computed."""
        ...

    def prompt_rows(self, plan: StepPlan) -> list[PromptRow]:
        """Rows that compute part of a prompt whose log-probabilities were asked for; call before `advance`."""
        ...

    def advance(self, plan: StepPlan, layout: Layout[Any]) -> None:
        """The plan's tokens are computed."""
        ...


class Sampler(Protocol):
    """Draws tokens and appends them to their slots."""

    def sample(self, logits: Tensor, step: Step, allowed: Allowed | None) -> Drawn:
        """Draw a token for each row of logits [S, vocab], which may be changed.

        Args:
            step: whose `rows` these are.
            allowed: masks of possible tokens; None if all are.
        """
        ...

    def prompt(self, row: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], list[TokenLogprobs]]:
        """Compute the log-probabilities of a prompt's tokens; the result waits for them.

        Args:
            logits_of: hidden states [n, hidden_size] to logits [n, vocab].
        """
        ...

    def watch(self, spans: Spans) -> None:
        """Have a profile see what it does."""
        ...


class Replay(Protocol):
    """Computes the steps that were recorded, or compiled, beforehand.

    Attributes:
        draws: tokens are drawn together with the forward pass, so masks must be known by then.
        count: steps replayed so far.
    """

    draws: bool
    count: int

    def takes(self, plan: StepPlan, variant: Variant) -> bool:
        """Whether the plan is such a step; its changes were applied to the slots. If so, `forward` follows."""
        ...

    def forward(self, step: Step, allowed: Allowed | None) -> None:
        """Compute the step that was just taken, up to its hidden states, or up to its tokens if the replay `draws`."""
        ...

    def sample(self, step: Step, allowed: Allowed | None) -> Drawn | None:
        """Draw a step's tokens if there is a recording for it; called before the next step's `forward`."""
        ...

    def retract(self, step: Step) -> Tensor:
        """Take back the tokens drawn by `forward`. Returns the logits [S, vocab] to draw from again."""
        ...

    def watch(self, spans: Spans) -> None:
        """Have a profile see what it does."""
        ...

    def close(self) -> None:
        """Drop what was recorded; the KV cache is gone."""
        ...


class NoReplay:
    """Nothing is recorded."""

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
        """There is nothing to see."""

    def close(self) -> None:
        """There is nothing to drop."""


class NoSampler:
    """For models without logits."""

    def sample(self, logits: Tensor, step: Step, allowed: Allowed | None) -> Drawn:
        raise AssertionError("the model has no logits")

    def prompt(self, row: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], list[TokenLogprobs]]:
        raise AssertionError("the model has no logits")

    def watch(self, spans: Spans) -> None:
        """There is nothing to see."""
