"""`Drawn`: a batch's sampled tokens, being transferred to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.device.transfer import Event


class Drawn(Protocol):
    """Tokens of S rows, and their log-probabilities. Of a row with drafts, those that are kept come first.

    Attributes:
        order: [T] int64, on the device, if drafts branched: the step's tokens in an order in which those that each row
            keeps come first, by their positions. None: they are in it.
    """

    order: Tensor | None

    @property
    def arrived(self) -> Event | None:
        """The event after the transfer of the tokens; None on the host."""
        ...

    def token_list(self) -> list[int]:
        """Wait for the tokens and return S of them, -1 for a row that can't be sampled."""
        ...

    def logprobs_of(self) -> dict[int, TokenLogprobs]:
        """Wait for the log-probabilities and return them by row index, for the rows that request them."""
        ...

    def kept(self) -> list[int] | None:
        """Wait for how many tokens each row of the plan that samples keeps; None if none had drafts, so 1 each."""
        ...


@dataclass(slots=True)
class DrawnHere:
    """Tokens sampled on the host."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    counts: list[int] | None = None
    order: Tensor | None = None
    arrived: None = None

    def token_list(self) -> list[int]:
        return self.tokens

    def logprobs_of(self) -> dict[int, TokenLogprobs]:
        return self.logprobs

    def kept(self) -> list[int] | None:
        return self.counts
