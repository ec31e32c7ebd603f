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
_AGE = 16
"""Measurements after which those of other limits are forgotten."""
_SOON, _FIRST = 16, 2
"""The first trials may take long because they load kernels: a failed one is repeated after the first number of steps,
until the second number of them have failed."""
_MARGIN = 1.08
"""Least gain of drafts that pay. A smaller gain is lost where requests end later than others."""


class Together:
    """One row with drafts makes the whole step longer, so the gain of all rows decides, as it was measured.

    A trial is a single step. If it gains, all steps have drafts, at most as many in a row as have gained the most;
    numbers beside the present one are tried. If they lose, there are none until the next trial. What is measured for
    the first time may have loaded kernels, so it is measured again before it counts as a loss.
    """

    def __init__(self, most: int, limit: int = 0) -> None:
        """
        Args:
            most: most drafts of a row.
            limit: number to begin with; 0 for a trial.
        """
        self._most = most
        self._limit = limit
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

    @property
    def paying(self) -> int:
        """The most drafts of a row, if they gain; else 0."""
        return self._limit

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
        trial, self._tries = not self._limit, False
        gain, loss = self._saved / self._took, self._took - self._saved
        self._steps, self._saved, self._took = 0, 0.0, 0.0
        if trial:
            self._judge_trial(step, gain, loss)
            return
        self._note(self._limit, gain)
        if max(self._gains.values()) >= _MARGIN:
            self._go_on(self._limit)
        else:
            self._give_up(step, loss)

    def _judge_trial(self, step: int, gain: float, loss: float) -> None:
        """Begin to draft if a trial gained. Its time alone is too uncertain to be compared with other limits'."""
        if gain >= _MARGIN:
            self._limit = min(TRIAL, self._most)
            self._sure.add(self._limit)
            return
        self._failed, self._lost = self._failed + 1, self._lost + loss
        if self._failed < _FIRST:
            self._try_at = step + _SOON
        else:
            self._give_up(step, self._lost)

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
        self._gains, self._sure, self._limit, self._paid, self._lost = {}, set(), 0, 0, 0.0
        self._failed = _FIRST
        self._try_at = step + min(max(self._pause, int(_LOSS * loss)), _LONGEST_PAUSE)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _better(self, limit: int) -> int:
        """Return a limit beside this one that has gained more, or else one that has not been tried; else this one."""
        beside = [other for other in (limit + 1, limit - 1) if 1 <= other <= self._most]
        best = max((other for other in beside if other in self._gains), key=self._gains.__getitem__, default=limit)
        if self._gains[best] > self._gains[limit]:
            return best if limit in self._sure else limit
        return next((other for other in beside if other not in self._gains), limit)
