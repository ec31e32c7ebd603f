"""`Metrics`: all metrics of GET /metrics, under Octavo's names and those that existing dashboards use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.core.stats import STEP_TOKENS, EngineStats
from octavo.engine.protocol import EngineClient
from octavo.server.metrics.engine import ENGINE_METRICS, EngineMetric, feature_metrics
from octavo.server.metrics.gpus import GpuMetrics
from octavo.server.metrics.histogram import BucketCounts
from octavo.server.metrics.http import HttpMetrics
from octavo.server.metrics.merge import Families, total
from octavo.server.metrics.requests import HISTOGRAMS, RequestHistograms, Tracing
from octavo.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIXES = ("octavo:", "vllm:")


class BatchCounts(Protocol):
    """Counts of batch requests."""

    @property
    def answered(self) -> Mapping[str, int]: ...

    @property
    def active(self) -> int: ...


class Metrics(Collector):
    """Reads the engine's statistics on demand, and holds the measurements of the HTTP side. No registry is shared.

    Attributes:
        requests: histograms over generation requests.
        http: counts and durations of HTTP requests.
        gpus: the GPUs of this machine, if the engine computes on one.
        batches: counts of batches, if they are served.
    """

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        *,
        log_requests: bool = False,
        tracing: Tracing | None = None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            draining: whether the server takes no new requests, since it is to end.
        """
        self.requests = RequestHistograms(log_requests=log_requests, tracing=tracing)
        self.http = HttpMetrics()
        self.gpus = GpuMetrics() if engine.info.accelerator == "cuda" else None
        self._engine = engine
        self._draining = draining
        self._labels = {"model_name": model_name, "engine": "0"}
        self._process = ProcessCollector(registry=None)
        self.batches: BatchCounts | None = None

    def exposition(self, others: Sequence[Families] = ()) -> bytes:
        """Return the text that Prometheus scrapes.

        Args:
            others: the `own` families of the server's other processes.
        """
        return generate_latest(
            _GivenFamilies([*self.shared(), *(total([list(self.own()), *others]) if others else self.own())])
        )

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self.shared()
        yield from self.own()

    def shared(self) -> Iterator[Metric]:
        """Yield the engine's metrics, under each prefix, and those of GPUs; equal in all processes that use the
        engine."""
        replicas = self._engine.replicas
        for prefix in PREFIXES:
            yield from self._engine_families(prefix, replicas)
        if self.gpus is not None:
            yield from self.gpus.families({"model_name": self._labels["model_name"]})
        # A replica that was started again has another process.
        yield from total([_process_families(pid) for pid in (one.info.pid for one in replicas) if pid])

    def own(self) -> Iterator[Metric]:
        """Yield this process's metrics: of requests (under each prefix), of HTTP and of the process itself."""
        for prefix in PREFIXES:
            yield from self._request_families(prefix)
        yield from self._tenant_families()
        yield from http_families(self.http)
        yield from self._process.collect()

    def _engine_families(self, prefix: str, replicas: Sequence[EngineClient]) -> Iterator[Metric]:
        """Yield the engine's families, with the samples of each replica."""
        each = [one.stats() for one in replicas]
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for number, stats in enumerate(each):
            for metric in (*ENGINE_METRICS, *feature_metrics(stats)):
                if metric.name not in families:
                    families[metric.name] = self._family(prefix, metric)
                for labels, value in metric.samples(stats):
                    families[metric.name].add_metric([*self._labels_of(number), *labels.values()], value)
        yield from families.values()
        yield self._step_family(prefix, each)
        info = self._engine.info
        yield self._gauge(
            prefix + "cache_config_info",
            "The KV cache's settings, as labels.",
            {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_blocks),
                "kv_bytes_per_token": str(info.kv_bytes_per_token),
                "max_model_len": str(info.max_model_len),
                "kv_cache_size_tokens": str(info.kv_tokens),
                "kv_cache_max_concurrency": f"{info.kv_tokens / info.max_model_len:.2f}",
            },
            1.0,
        )
        yield self._gauge(prefix + "build_info", "The server's version, as a label.", {"version": __version__}, 1.0)
        text = "1 while the server finishes its requests and takes no new ones, else 0."
        yield self._gauge(prefix + "server_draining", text, {}, float(self._draining()))
        text = "1 while the engine lives and makes progress, else 0."
        healthy = GaugeMetricFamily(prefix + "engine_healthy", text, labels=list(self._labels))
        for number, one in enumerate(replicas):
            healthy.add_metric(self._labels_of(number), float(one.health().ok))
        yield healthy

    def _labels_of(self, number: int) -> list[str]:
        """Return the values of the labels for a replica."""
        return list((self._labels | {"engine": str(number)}).values())

    def _step_family(self, prefix: str, each: Sequence[EngineStats]) -> Metric:
        text = "Tokens of prompts computed and new tokens sampled in one step of the engine."
        family = HistogramMetricFamily(prefix + "iteration_tokens_total", text, labels=list(self._labels))
        bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
        for number, stats in enumerate(each):
            counts = list(accumulate(stats.steps_by_tokens))
            family.add_metric(self._labels_of(number), list(zip(bounds, counts, strict=True)), stats.handled_tokens)
        return family

    def _family(self, prefix: str, metric: EngineMetric) -> GaugeMetricFamily | CounterMetricFamily:
        names = [*self._labels, *([metric.label] if metric.label else [])]
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        return kind(prefix + metric.name, metric.help, labels=names)

    def _gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, *labels])
        family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def _request_families(self, prefix: str) -> Iterator[Metric]:
        values = list(self._labels.values())
        success = CounterMetricFamily(
            prefix + "request_success",
            "Finished choices by finish reason.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in self.requests.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        rejections = CounterMetricFamily(
            prefix + "admission_rejections",
            "Requests refused because the queue was full, or their tenant had too many, by limit.",
            labels=[*self._labels, "reason"],
        )
        for reason, count in self.requests.refused.items():
            rejections.add_metric([*values, reason], count)
        yield rejections
        slow = CounterMetricFamily(
            prefix + "slow_readers",
            "Requests aborted or connections closed because the client read too slowly.",
            labels=[*self._labels, "outcome"],
        )
        slow.add_metric([*values, "request_ended"], self._engine.slow_readers)
        slow.add_metric([*values, "connection_closed"], self.http.unread_closed)
        yield slow
        yield from self._batch_families(prefix)
        for name, (text, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(prefix + name, text, labels=list(self._labels))
            _add(family, values, self.requests.histograms[name])
            yield family

    def _tenant_families(self) -> Iterator[Metric]:
        """Yield the tenants' families, under Octavo's prefix alone: no existing dashboard has them."""
        requests = (record.request for record in self.requests.live)
        live = ((one.tenant, self._engine.received(one.id).tokens > 0) for one in requests)
        yield from self.requests.tenants.families(PREFIXES[0], self._labels, live)

    def _batch_families(self, prefix: str) -> Iterator[Metric]:
        if self.batches is None:
            return
        text = "Requests of batches that were answered, with success (completed) or not (failed)."
        lines = CounterMetricFamily(prefix + "batch_requests", text, labels=[*self._labels, "outcome"])
        for outcome, count in self.batches.answered.items():
            lines.add_metric([*self._labels.values(), outcome], count)
        yield lines
        yield self._gauge(prefix + "batches_active", "Batches that have not ended.", {}, self.batches.active)


def http_families(http: HttpMetrics) -> Iterator[Metric]:
    """Yield the families of HTTP requests."""
    requests = CounterMetricFamily(
        "http_requests", "HTTP requests by route, method and status class.", labels=["handler", "method", "status"]
    )
    for (handler, method, status), count in http.requests.items():
        requests.add_metric([handler, method, status], count)
    yield requests
    durations = HistogramMetricFamily(
        "http_request_duration_seconds",
        "Time from a request's first byte to its response's last.",
        labels=["handler", "method"],
    )
    for (handler, method), histogram in http.durations.items():
        _add(durations, [handler, method], histogram)
    yield durations


class _GivenFamilies(Collector):
    """A collector of given families."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _process_families(pid: int) -> Iterable[Metric]:
    return ProcessCollector("octavo_engine", pid=lambda: pid, registry=None).collect()


def _add(family: HistogramMetricFamily, labels: list[str], histogram: BucketCounts) -> None:
    family.add_metric(labels, histogram.buckets(), histogram.total)
