"""`Together`: whether the rows of a large step draft, which is all of them or none."""

from __future__ import annotations

TRIAL = 2
"""Drafts of each row of a trial."""
_PAUSE, _LONGEST_PAUSE = 64, 2048
"""Steps from one trial to the next while drafts don't pay; each failed trial doubles it."""
_LOSS = 200
"""Least steps from a trial to the next, for each step without drafts whose time it cost: half a percent."""
_STEPS = 8
"""Least steps of a measurement, except a trial's."""
_AGE = 8
"""Measurements after which those of other limits are forgotten."""
_SOON, _FIRST = 16, 3
"""The first trials may take long because they load kernels: a failed one is repeated after that many steps, until so
many have failed."""
_MARGIN = 1.01
"""Least gain of drafts that pay."""


class Together:
    """One row with drafts makes the whole step longer, so the gain of all rows decides, as it was measured.

    A trial is a single step. If it gains, all steps have drafts, at most as many in a row as have gained the most;
    numbers beside the present one are tried. If they lose, there are none until the next trial. What is measured for
    the first time may have loaded kernels, so it is measured again before it counts as a loss.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = 0
        self._gains: dict[int, float] = {}
        """What each limit gained since drafts began to pay."""
        self._sure: set[int] = set()
        """Limits that were measured more than once."""
        self._pause = _PAUSE
        self._try_at = 0
        self._tries = False
        self._failed, self._lost = 0, 0.0
        """The first trials that failed, and the steps without drafts whose time they cost."""
        self._paid = 0
        """Measurements in a row that gained."""
        self._steps, self._saved, self._took = 0, 0.0, 0.0

    def limit(self, step: int) -> int:
        """Return the most drafts of a row after this step. 0 most of the time while they don't pay."""
        if self._limit or step < self._try_at:
            return self._limit
        self._tries = True
        self._try_at = step + self._pause
        return min(TRIAL, self._most)

    def measured(self, step: int, steps: int, saved: float, took: float) -> None:
        """Learn from steps with drafts.

        Args:
            step: number of the present step.
            steps: how many there were.
            saved: how many steps without drafts would have given as many tokens.
            took: their time, in steps without drafts.
        """
        if not self._limit and not self._tries:
            return  # planned before the decision against drafts
        self._steps, self._saved, self._took = self._steps + steps, self._saved + saved, self._took + took
        if self._limit and self._steps < _STEPS:
            return
        self._tries = False
        gain, loss = self._saved / self._took, self._took - self._saved
        self._steps, self._saved, self._took = 0, 0.0, 0.0
        limit = self._limit or min(TRIAL, self._most)
        self._note(limit, gain)
        if max(self._gains.values()) >= _MARGIN:
            self._go_on(limit)
        else:
            self._give_up(step, loss)

    def _note(self, limit: int, gain: float) -> None:
        """Remember what a limit gained: the better one of its first two measurements, then a mean."""
        before = self._gains.get(limit)
        if before is None:
            self._gains[limit] = gain
            return
        self._gains[limit] = (before + gain) / 2 if limit in self._sure else max(before, gain)
        self._sure.add(limit)

    def _go_on(self, limit: int) -> None:
        self._paid += 1
        if self._paid % _AGE == 0:
            self._pause = _PAUSE
            self._gains = {limit: self._gains[limit]}
        self._limit = self._better(limit)

    def _give_up(self, step: int, loss: float) -> None:
        """Draft nothing until the next trial."""
        self._gains, self._sure, self._limit, self._paid = {}, set(), 0, 0
        self._failed, self._lost = self._failed + 1, self._lost + loss
        if self._failed < _FIRST:
            self._try_at = step + _SOON
            return
        self._try_at = step + min(max(self._pause, int(_LOSS * self._lost)), _LONGEST_PAUSE)
        self._pause, self._lost = min(2 * self._pause, _LONGEST_PAUSE), 0.0

    def _better(self, limit: int) -> int:
        """Return this limit or one beside it, which has gained more or has not been tried."""
        here, fewer, more = self._gains[limit], self._gains.get(limit - 1, 0.0), self._gains.get(limit + 1)
        if fewer > here:
            return limit if limit not in self._sure else limit - 1
        if limit < self._most and (more is None or more > here):
            return limit + 1
        return limit
