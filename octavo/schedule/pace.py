"""`Pace`: which prompts can wait, so that they are computed beside decodes instead of ahead of them.

The products of a step of few tokens take as long as reading the weights does, so up to a certain number further tokens
cost little. If it is known how long the answers are (`max_tokens`), the prompts of the shorter ones can be spread over
the steps that the longest one needs anyway; whoever starts the longest first ends soonest (Graham 1969, "Bounds on
Multiprocessing Timing Anomalies"). Chunks of prompts that ride along with decodes: Sarathi-Serve, arXiv:2403.02310.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class Pace:
    """What one step takes of prompts.

    Attributes:
        tokens: up to so many in the step, with what decodes, any prompt is welcome.
        steps: which the longest answer still takes at most. Beyond `tokens` only prompts of answers as long are.
    """

    tokens: int
    steps: int

    @classmethod
    def of(cls, tokens: int, alive: Iterable[Request]) -> Pace:
        """The pace of the next step, given who runs and who is next in line."""
        return cls(tokens, max((_steps_of(request) for request in alive), default=0))

    def allowed(self, request: Request, taken: int, budget: int) -> int:
        """The tokens of a prompt that may join `taken` others, where `budget` are left to the step."""
        return budget if _steps_of(request) >= self.steps else max(0, min(budget, self.tokens - taken))


def _steps_of(request: Request) -> int:
    """The tokens that its answer still lacks, if it becomes as long as it may."""
    return request.max_tokens - request.num_output - request.pending
