"""`Drawn`: a batch's tokens on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from octavo.core.output import TokenLogprobs
from octavo.device.transfer import Event


class Drawn(Protocol):
    """Tokens of S rows, and what is reported with them."""

    @property
    def arrived(self) -> Event | None:
        """When the device had sent the tokens; None on the host."""
        ...

    def token_list(self) -> list[int]:
        """Wait for the tokens: S of them, -1 for a row that can't be sampled."""
        ...

    def logprobs_of(self) -> dict[int, TokenLogprobs]:
        """Wait for the log-probabilities: index among the S rows -> its own, for the rows that asked."""
        ...


@dataclass(slots=True)
class DrawnHere:
    """Tokens that the host itself drew."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    arrived: None = None

    def token_list(self) -> list[int]:
        return self.tokens

    def logprobs_of(self) -> dict[int, TokenLogprobs]:
        return self.logprobs
