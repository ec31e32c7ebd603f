"""`StepCosts`: what steps took, with and without drafts, by the number of their rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_DECAY = 0.95
"""Weight of what is known against a new measurement."""
_OUTLIER = 4.0
"""A step that takes this many times what is usual, or this part of it, was delayed by something else, such as a pause
of the process, or planned ahead of its turn."""
_FEW, _MEMORY = 3, 15
"""Steps that are few, and those whose median counts."""
_SPREAD = 0.25
"""Variance of the number of drafts from which their cost can be told from the rest of the step's."""
_PRIOR = 0.4
"""Until measured: cost of a draft, as a share of a step's cost for each row."""


@dataclass(slots=True)
class _Line:
    """Seconds of steps with drafts as a line over their number, by least squares with decaying weights.

    Attributes:
        slope: seconds for each draft, from the last steps whose numbers of drafts differed; 0.0 before these.
    """

    weight: float = 0.0
    drafts: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    slope: float = 0.0

    def add(self, drafts: float, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("drafts", drafts),
            ("seconds", seconds),
            ("squares", drafts * drafts),
            ("products", drafts * seconds),
        ):
            setattr(self, name, getattr(self, name) * _DECAY + value)
        mean = self.drafts / self.weight
        spread = self.squares / self.weight - mean * mean
        if spread > _SPREAD:
            self.slope = max(0.0, (self.products / self.weight - mean * self.seconds / self.weight) / spread)

    def fit(self, slope: float) -> tuple[float, float]:
        """Return seconds without drafts and seconds for each draft.

        Args:
            slope: the second one, until the measurements say it.
        """
        mean, drafts = self.seconds / self.weight, self.drafts / self.weight
        slope = min(self.slope or slope, mean / max(drafts, 1.0))
        return mean - slope * drafts, slope


@dataclass(slots=True)
class _Measured:
    """Steps of about the same number of rows.

    Attributes:
        times: seconds of the last steps without drafts.
        odd: measurements in a row that were left out.
    """

    line: _Line = field(default_factory=_Line)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    odd: int = 0

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts; 0.0 before the first."""
        return median(self.times) if self.times else 0.0


class StepCosts:
    """Seconds of steps that only decode. Steps with other rows say nothing about drafts."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def add(self, rows: int, drafts: float, seconds: float) -> None:
        """Note that a step of `rows` rows, with `drafts` drafts in all of them together, took `seconds`."""
        one = self._measured.setdefault(size_class(rows), _Measured())
        if not drafts:
            one.times.append(seconds)
            return
        usual = sum(self.step(rows, drafts))
        if usual and not usual / _OUTLIER <= seconds <= _OUTLIER * usual:
            one.odd += 1
            if one.odd < _FEW:
                return
            one.line = _Line()  # what was thought usual was not: kernels were loaded, or two steps planned at once
        one.odd = 0
        one.line.add(drafts, seconds)

    def needs_plain(self, rows: int) -> bool:
        """Return whether steps of this many rows were measured with drafts, but hardly any without."""
        one = self._measured.get(size_class(rows))
        return one is not None and len(one.times) < _FEW and one.line.weight >= _FEW - 1

    def plain(self, rows: int) -> float:
        """Return the seconds of a step without drafts; 0.0 if unknown."""
        one = self._measured.get(size_class(rows))
        return one.plain if one is not None and len(one.times) >= _FEW else 0.0

    def step(self, rows: int, drafts: float) -> tuple[float, float]:
        """Return the seconds of a step without its drafts, and of its drafts; both 0.0 if nothing is known."""
        one = self._measured.get(size_class(rows))
        plain = self.plain(rows)
        slope = _PRIOR * plain / rows
        if one is None or not one.line.weight:
            return plain, slope * drafts
        base, slope = one.line.fit(slope)
        return base, slope * drafts


def size_class(rows: int) -> int:
    """Return the class of a number of rows: exact up to 8, then two for each power of two."""
    if rows <= 8:
        return rows
    exponent = rows.bit_length() - 1
    return 2 * exponent + (rows >> (exponent - 1) & 1) + 8
