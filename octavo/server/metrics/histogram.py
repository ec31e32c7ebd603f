"""A histogram for one event loop: a bisection and two additions per observation, and no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class BucketCounts:
    """Counts of values by upper bound (inclusive), and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts with their bounds as Prometheus writes them, the last one "+Inf"."""
        result = []
        running = 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            running += count
            result.append((str(bound), float(running)))
        return result
