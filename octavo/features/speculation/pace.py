"""`Pace`: what steps took, from the times at which they were planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_LONGEST = 8
"""Most steps with drafts in a row that are one measurement, where steps are launched ahead."""


class PlannedDecode(NamedTuple):
    """A step that only decodes.

    Attributes:
        began: when it was planned.
        rows, drafts: how many it has in all; tokens that are computed again count as drafts.
        ahead: steps that were in flight then.
    """

    began: float
    rows: int
    drafts: int
    ahead: int


class Measured(NamedTuple):
    """Seconds of each of `steps` steps with this many rows and, on average, drafts."""

    rows: int
    drafts: float
    seconds: float
    steps: int = 1


class Pace:
    """Divides the time between plans among steps.

    In a busy engine, one step is planned in the time that one takes. If a step is launched while others are in flight,
    the host then waits for an earlier one, so the time until the next plan is that one's, unless the launch itself
    takes longer. Steps with drafts in a row are therefore measured together, until as many steps without drafts as are
    in flight have followed. The times between plans are then those of both, and of them as many in a row as there are
    steps with drafts take no longer than these.
    """

    def __init__(self) -> None:
        self.interrupt()

    def interrupt(self) -> None:
        """Forget the steps in flight: the time until the next plan may be idle or another kind of step's."""
        self._chain: list[PlannedDecode] = []
        self._times: list[float] = []
        """Seconds from the plan of each step of the chain, and after it, to the next."""
        self._shifted = False
        """Whether the first of them are those of steps with drafts before the chain."""
        self._settling = 0
        """Steps without drafts in whose time others ran."""

    def ended(self, step: PlannedDecode, now: float, plain: float) -> Iterator[Measured]:
        """Return what is known when the step after this one is planned.

        Args:
            plain: seconds of a step without drafts; 0.0 if unknown.
        """
        if step.drafts:
            return self._drafted(step, now - step.began, plain)
        return self._plain(step, now - step.began, plain)

    def _drafted(self, step: PlannedDecode, seconds: float, plain: float) -> Iterator[Measured]:
        if self._chain and (self._chain[0].rows != step.rows or self._settling < self._chain[-1].ahead):
            self._begin(shifted=True)
        self._chain.append(step)
        self._times.append(seconds)
        self._settling = step.ahead
        if not step.ahead or len(self._chain) == _LONGEST:
            yield self._mean(plain)
            self._begin(shifted=step.ahead > 0)

    def _plain(self, step: PlannedDecode, seconds: float, plain: float) -> Iterator[Measured]:
        if not self._settling:
            yield Measured(step.rows, 0, seconds)
            return
        self._settling -= 1
        if not self._shifted:
            self._times.append(seconds)
        if self._chain and (self._shifted or not self._settling):
            yield self._mean(plain)
            self._begin(shifted=self._settling > 0)
        elif not self._settling:
            self._shifted = False

    def _begin(self, *, shifted: bool) -> None:
        """Begin the next chain."""
        self._chain, self._times, self._shifted = [], [], shifted

    def _mean(self, plain: float) -> Measured:
        steps, ahead = len(self._chain), 0 if self._shifted else self._chain[0].ahead
        seconds = 0.0
        for first in range(len(self._times) - steps + 1):
            seconds = max(seconds, sum(self._times[first : first + steps]) / steps)
        if plain and len(self._times) > ahead:
            seconds = max(seconds, (sum(self._times) - ahead * plain) / (len(self._times) - ahead))
        drafts = sum(one.drafts for one in self._chain) / steps
        return Measured(self._chain[0].rows, drafts, seconds, steps)
