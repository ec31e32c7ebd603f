"""`Quarantine`: after a failed step, run its requests one by one, so that only the one at fault ends with an error."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.output import FinishReason
from octavo.schedule.request import Request

MAX_UNEXPLAINED = 3
"""Failed steps without a culprit that a request may be part of. After these it ends with the error, since requests that
fail only together would fail forever."""


class Quarantine:
    """Suspected requests in the order of their turns, each with the number of steps that it must still pass alone.

    That number is the steps it had in flight when a step failed: repeating them reproduces any failure of its own.
    """

    def __init__(self) -> None:
        self._suspects: dict[Request, int] = {}
        self._unexplained: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def current(self) -> Request | None:
        """The suspect whose turn it is; None without suspects. Drops suspects that have ended."""
        while self._suspects:
            first = next(iter(self._suspects))
            if first.finish is None:
                return first
            if first.finish is FinishReason.ABORT:
                self.convicted()  # it may have been at fault, which can't be found out any more
            del self._suspects[first]
        return None

    def enter(self, inflight: Mapping[Request, int]) -> list[Request]:
        """Add suspects, each with its steps in flight; return those that must end (see `MAX_UNEXPLAINED`)."""
        self._unexplained = {r: self._unexplained.get(r, 0) + 1 for r in inflight}
        ended = [r for r, rounds in self._unexplained.items() if rounds > MAX_UNEXPLAINED]
        self._suspects |= {r: steps for r, steps in inflight.items() if r not in ended}
        return ended

    def passed(self, request: Request) -> None:
        """Count a passed step of a request; a suspect ran it alone."""
        if request in self._suspects:
            self._suspects[request] -= 1
            if not self._suspects[request]:
                del self._suspects[request]

    def convicted(self) -> None:
        """Forget unexplained failures: a request failed alone, which explains them."""
        self._unexplained = {}

    def postpone(self) -> None:
        """Move the current suspect, which can't run now, behind the others."""
        first = next(iter(self._suspects))
        self._suspects[first] = self._suspects.pop(first)
