"""The engine's counters for `LLM.get_metrics`, with the names and labels of the server's /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from octavo.core.info import ModelInfo
from octavo.core.stats import STEP_TOKENS, EngineStats
from octavo.server.metrics.engine import ENGINE_METRICS, feature_metrics
from octavo.server.metrics.metrics import PREFIXES


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, or in a subclass several, with its name and labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only increases."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """`buckets` are cumulative: upper bound -> number of values up to and including it."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(info: ModelInfo, stats: EngineStats) -> list[Metric]:
    """Return all metrics, once under each prefix of /metrics."""
    labels = {"model_name": info.name}
    return [metric for prefix in PREFIXES for metric in _metrics(prefix, labels, stats)]


def _metrics(prefix: str, labels: dict[str, str], stats: EngineStats) -> Iterator[Metric]:
    for metric in (*ENGINE_METRICS, *feature_metrics(stats)):
        kind = Gauge if metric.kind == "gauge" else Counter
        for more, value in metric.samples(stats):
            yield kind(prefix + metric.name, labels | more, value)
    counts = list(accumulate(stats.steps_by_tokens))
    bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
    buckets = dict(zip(bounds, counts, strict=True))
    yield Histogram(prefix + "iteration_tokens_total", labels, counts[-1], stats.handled_tokens, buckets)
