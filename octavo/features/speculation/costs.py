"""`StepCosts`: what steps took, with and without drafts, by the number of their rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

_FEW, _MEMORY = 3, 15
"""Fewest steps of an estimate, and most. Medians leave out steps that something else delayed, such as the loading of
kernels or a pause of the process."""
_RENEWAL = 4
"""Steps after which the line of steps with drafts is computed again, once `_MEMORY` of these are known."""
_PRIOR = 0.4
"""Until measured: cost of a draft, as a share of a step's cost for each row."""


@dataclass(slots=True)
class _Measured:
    """Steps of about the same number of rows.

    Attributes:
        times: seconds of the last steps without drafts.
        plain: their median; 0.0 before the first.
        drafted: drafts and seconds of the last steps with drafts.
        slope: seconds for each draft, from the last steps whose numbers of drafts differed; None before these.
        known: the result of `line` when it was last computed.
        unread: steps noted since then.
    """

    times: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    plain: float = 0.0
    drafted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    slope: float | None = None
    known: tuple[float, float] = (0.0, 0.0)
    unread: int = 0

    def add(self, drafts: float, seconds: float) -> None:
        if drafts:
            self.drafted.append((drafts, seconds))
        else:
            self.times.append(seconds)
            self.plain = median(self.times)
        self.unread += 1

    def line(self, plain: float, slope: float) -> tuple[float, float]:
        """Return seconds without drafts and seconds for each draft, of a step with drafts.

        Args:
            plain: seconds of a step without drafts: the least that one with drafts takes without them.
            slope: the second result, until the measurements say it.
        """
        if self.unread >= (_RENEWAL if len(self.drafted) == _MEMORY else 1):
            self._find_slope()
            self.known, self.unread = self._line(plain, slope), 0
        return self.known

    def _find_slope(self) -> None:
        """Set the slope to the median of those between two steps (Theil and Sen)."""
        slopes = [
            (late - early) / (more - fewer)
            for (fewer, early), (more, late) in combinations(self.drafted, 2)
            if abs(more - fewer) >= 1
        ]
        if slopes:
            self.slope = max(0.0, median(slopes))

    def _line(self, plain: float, slope: float) -> tuple[float, float]:
        drafts, seconds = (median(values) for values in zip(*self.drafted, strict=True))
        slope = slope if self.slope is None else self.slope
        slope = min(slope, max(0.0, seconds - plain) / drafts)
        return max(0.0, median(one - slope * count for count, one in self.drafted)), slope


class StepCosts:
    """Seconds of steps that only decode. Steps with other rows are no measure of drafts."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def add(self, rows: int, drafts: float, seconds: float) -> None:
        """Note that a step of `rows` rows, with `drafts` drafts in all of them together, took `seconds`."""
        self._measured.setdefault(size_class(rows), _Measured()).add(drafts, seconds)

    def needs_plain(self, rows: int) -> bool:
        """Return whether steps of this many rows were measured with drafts, but hardly any without."""
        one = self._measured.get(size_class(rows))
        return one is not None and len(one.times) < _FEW and len(one.drafted) >= _FEW - 1

    def plain(self, rows: int) -> float:
        """Return the seconds of a step without drafts; 0.0 if unknown."""
        one = self._measured.get(size_class(rows))
        return one.plain if one is not None and len(one.times) >= _FEW else 0.0

    def step(self, rows: int, drafts: float) -> tuple[float, float]:
        """Return the seconds of a step without its drafts, and of its drafts; both 0.0 if nothing is known."""
        one = self._measured.get(size_class(rows))
        plain = self.plain(rows)
        slope = _PRIOR * plain / rows
        if one is None or not one.drafted:
            return plain, slope * drafts
        base, slope = one.line(plain, slope)
        return base, slope * drafts


def size_class(rows: int) -> int:
    """Return the class of a number of rows: exact up to 8, then two for each power of two."""
    if rows <= 8:
        return rows
    exponent = rows.bit_length() - 1
    return 2 * exponent + (rows >> (exponent - 1) & 1) + 8
