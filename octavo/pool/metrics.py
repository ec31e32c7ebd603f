"""Metrics of a server of several models: those of their processes, each with its model's name, and the pool's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from octavo.pool.pool import Member, Pool
from octavo.pool.seats import Standing
from octavo.server.metrics.http import HttpMetrics
from octavo.server.metrics.merge import total
from octavo.server.metrics.metrics import http_families

_LABEL = "model_name"
_STATES = ("loaded", "asleep", "loading", "unloading", "unloaded")


class PoolMetrics:
    """All metrics of the server.

    Args:
        http: the requests that the front process has answered itself.
    """

    def __init__(self, pool: Pool, http: HttpMetrics) -> None:
        self._pool = pool
        self._http = http
        self._process = ProcessCollector(registry=None)

    async def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes. Each family is in it once.

        Every sample of a model's process has the label `model_name`, so that none are added up: a process that ends
        would make the sum decrease.
        """
        said = await asyncio.gather(*(_families(member) for member in self._pool.members.values()))
        return generate_latest(_Given(total([self._own(), *said])))

    def _own(self) -> Iterator[Metric]:
        yield from self._pool_families()
        yield from http_families(self._http)
        yield from self._process.collect()

    def _pool_families(self) -> Iterator[Metric]:
        members, counts = list(self._pool.members.values()), self._pool.counts
        states = GaugeMetricFamily(
            "octavo:pool_model_state", "1 for the state of each model, else 0.", labels=[_LABEL, "state"]
        )
        for member in members:
            for state in _STATES:
                states.add_metric([member.name, state], float(member.state == state))
        yield states
        waiting = {member.name: float(len(member.seat.waiting)) for member in members}
        yield _gauge("requests_waiting", "Requests that wait until their model is loaded.", waiting)
        inside = (Standing.IN, Standing.CLOSED)
        active = {one.name: float(one.seat.running if one.seat.standing in inside else 0) for one in members}
        yield _gauge("requests_running", "Requests that their model's process answers.", active)
        for name, text, values in (
            ("loads", "Processes of a model that were started.", counts.loads),
            ("wakes", "Times that a model was woken up.", counts.wakes),
            ("load_seconds", "Seconds of loads and wake-ups.", counts.load_s),
            ("evictions", "Times that a model's memory was freed: it was put to sleep or stopped.", counts.evictions),
            ("deaths", "Processes of a model that ended by themselves.", counts.deaths),
            ("load_failures", "Loads that failed.", counts.failures),
            ("requests_refused", "Requests that were refused since their model was not loaded.", counts.refused),
        ):
            yield _counter(name, text, {member.name: float(values[member.name]) for member in members})


class _Given(Collector):
    """A collector of given families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"octavo:pool_{name}", text, labels=[_LABEL])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


def _counter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"octavo:pool_{name}", text, labels=[_LABEL])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


async def _families(member: Member) -> list[Metric]:
    """Return a process's metrics; none if it does not answer."""
    answer = await member.told("/metrics")
    found = () if answer is None else text_string_to_metric_families(answer.decode())
    return [_labelled(one, member.name) for one in found]


def _labelled(family: Metric, model: str) -> Metric:
    named = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            named.add_sample(sample.name, {_LABEL: model, **sample.labels}, sample.value)
    return named
