"""Goals of a search, such as "ttft p99 < 500ms", and how far a simulation is from them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.report import TITLES, Summary, percentile
from octavo.core.errors import ConfigError

_FORM = re.compile(r"(\w+)\s+(mean|median|p\d+(?:\.\d+)?)\s*<=?\s*([\d.]+)\s*(ms|s)")


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit for a figure of all requests.

    Attributes:
        metric: of `TITLES`.
        percent: the percentile; None for the mean.
        limit: in milliseconds.
    """

    metric: str
    percent: float | None
    limit: float

    @property
    def name(self) -> str:
        return f"{self.metric} {'mean' if self.percent is None else f'p{self.percent:g}'}"

    def value(self, summary: Summary) -> float:
        """Return the figure in milliseconds; infinite if requests failed or there is no value."""
        values = summary.series[self.metric]
        if summary.failed or not values:
            return math.inf if summary.failed or self.metric in ("ttft", "e2el") else 0.0
        return sum(values) / len(values) if self.percent is None else percentile(values, self.percent)

    def missed(self, summary: Summary) -> float:
        """Return by which fraction of the limit it is exceeded; 0 if it is kept."""
        return max(0.0, self.value(summary) / self.limit - 1)


def parse_goal(text: str) -> Goal:
    """Parse a goal.

    Raises:
        ConfigError: the text is not of this form.
    """
    match = _FORM.fullmatch(text.strip().lower())
    metric = "e2el" if match and match[1] == "e2e" else match[1] if match else ""
    if match is None or metric not in TITLES:
        raise ConfigError(
            f"--goal {text!r} must be a metric ({', '.join(TITLES)}), mean, median or a percentile, and a limit in ms "
            'or s, such as "ttft p99 < 500ms".'
        )
    percent = {"mean": None, "median": 50.0}.get(match[2], float(match[2][1:]) if match[2][0] == "p" else None)
    limit = float(match[3]) * (1000 if match[4] == "s" else 1)
    if not limit > 0 or (percent is not None and percent > 100):
        raise ConfigError(f"--goal {text!r}: the limit must be over 0, and a percentile at most 100.")
    return Goal(metric, percent, limit)


def missed(goals: Sequence[Goal], summary: Summary) -> float:
    """Return the sum of what the goals are exceeded by."""
    return sum(goal.missed(summary) for goal in goals)
