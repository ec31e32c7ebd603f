"""Counts and durations of HTTP requests by route."""

from __future__ import annotations

from collections import Counter

from octavo.server.metrics.histogram import BucketCounts

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class HttpMetrics:
    """`requests` by (handler, method, status class), `durations` by (handler, method).

    The handler is a route's template, or "none" for unknown paths, so that clients can't create labels.

    Attributes:
        unread_closed: connections closed because their clients did not read.
    """

    def __init__(self) -> None:
        self.unread_closed = 0
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.durations: dict[tuple[str, str], BucketCounts] = {}

    def count_unread(self) -> None:
        self.unread_closed += 1

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        method = method if method in _METHODS else "other"
        self.requests[handler, method, f"{status // 100}xx"] += 1
        histogram = self.durations.get((handler, method))
        if histogram is None:
            histogram = self.durations[handler, method] = BucketCounts(_SECONDS)
        histogram.observe(seconds)
