"""`Quarantine`: after a failed step its requests run one by one, so that only the one at fault ends with an error."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.output import FinishReason
from octavo.schedule.request import Request

MAX_UNEXPLAINED = 3
"""So often may a request be in a failed step for which nobody was found guilty. Then it ends with the error, for what
fails only together would fail for ever."""


class Quarantine:
    """The requests under suspicion, in the order of their turns, and how many steps each must still get through alone.

    As many as it had in flight when a step failed: by then whatever was wrong with it has come up again.
    """

    def __init__(self) -> None:
        self._suspects: dict[Request, int] = {}
        self._unexplained: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def current(self) -> Request | None:
        """Whose turn it is; None if nobody is under suspicion. Those that have ended are forgotten here."""
        while self._suspects:
            first = next(iter(self._suspects))
            if first.finish is None:
                return first
            if first.finish is FinishReason.ABORT:
                self.convicted()  # it may have been the one, and nobody will know
            del self._suspects[first]
        return None

    def enter(self, inflight: Mapping[Request, int]) -> list[Request]:
        """Suspect these, each with its steps in flight; returns those that are out of chances and must end."""
        self._unexplained = {r: self._unexplained.get(r, 0) + 1 for r in inflight}
        ended = [r for r, rounds in self._unexplained.items() if rounds > MAX_UNEXPLAINED]
        self._suspects |= {r: steps for r, steps in inflight.items() if r not in ended}
        return ended

    def passed(self, request: Request) -> None:
        """The request got a token; alone, if it is under suspicion."""
        if request in self._suspects:
            self._suspects[request] -= 1
            if not self._suspects[request]:
                del self._suspects[request]

    def convicted(self) -> None:
        """Somebody failed alone, which explains the failures so far."""
        self._unexplained = {}

    def postpone(self) -> None:
        """It can't run now: the others go first."""
        first = next(iter(self._suspects))
        self._suspects[first] = self._suspects.pop(first)
