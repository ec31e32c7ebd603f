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
_ODD, _SOON, _FEW = 8.0, 16, 3
"""A trial that takes as long as this many steps may have loaded kernels: it is repeated after that many steps, at most
so often."""
_MARGIN = 1.01
"""Least gain of drafts that pay."""


class Together:
    """One row with drafts makes the whole step longer, so the gain of all rows decides, as it was measured.

    A trial is a single step. If it gains, all steps have drafts, at most as many in a row as have gained the most;
    numbers beside the present one are tried. If they lose, there are none until the next trial.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = 0
        self._gains: dict[int, float] = {}
        """What each limit gained since drafts began to pay."""
        self._pause = _PAUSE
        self._try_at = 0
        self._tries = False
        self._odd = 0
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
        trial, self._tries = self._tries, False
        limit, gain, loss = self._limit or min(TRIAL, self._most), self._saved / self._took, self._took - self._saved
        self._gains[limit] = (self._gains.get(limit, gain) + gain) / 2
        if max(self._gains.values()) >= _MARGIN:
            self._go_on(limit)
        elif trial and gain < 1 / _ODD and self._odd < _FEW:
            self._gains, self._try_at, self._odd = {}, step + _SOON, self._odd + 1
        else:
            self._gains, self._limit, self._paid = {}, 0, 0
            self._try_at = step + min(max(self._pause, int(_LOSS * loss)), _LONGEST_PAUSE)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._steps, self._saved, self._took = 0, 0.0, 0.0

    def _go_on(self, limit: int) -> None:
        self._paid += 1
        if self._paid % _AGE == 0:
            self._pause = _PAUSE
            self._gains = {limit: self._gains[limit]}
        self._limit = self._better(limit)

    def _better(self, limit: int) -> int:
        """Return this limit or one beside it, which has gained more or has not been tried."""
        here, fewer, more = self._gains[limit], self._gains.get(limit - 1, 0.0), self._gains.get(limit + 1)
        if fewer > here:
            return limit - 1
        if limit < self._most and (more is None or more > here):
            return limit + 1
        return limit
