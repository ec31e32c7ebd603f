"""`GpuMetrics`: what this machine's GPUs do, read by NVML when /metrics is scraped."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.core.nvml import SLOWED, GpuState, Nvml, chosen

log = logging.getLogger(__name__)

PREFIX = "octavo:"
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Gauge:
    name: str
    help: str
    read: Callable[[GpuState], float | None]


_GAUGES = (
    _Gauge("gpu_utilization", "Fraction of the last moments in which a kernel ran, 0 to 1.", lambda gpu: gpu.busy),
    _Gauge(
        "gpu_memory_utilization",
        "Fraction of the last moments in which the memory was read or written, 0 to 1.",
        lambda gpu: gpu.memory_busy,
    ),
    _Gauge("gpu_memory_used_bytes", "Memory in use, by all processes.", lambda gpu: gpu.memory_used),
    _Gauge("gpu_memory_total_bytes", "Memory that there is.", lambda gpu: gpu.memory_total),
    _Gauge("gpu_power_watts", "Power that the GPU draws.", lambda gpu: gpu.power_w),
    _Gauge("gpu_power_limit_watts", "Power that the GPU may draw.", lambda gpu: gpu.power_limit_w),
    _Gauge("gpu_temperature_celsius", "Temperature of the GPU's core.", lambda gpu: gpu.temperature_c),
    _Gauge("gpu_sm_clock_hertz", "Clock of the multiprocessors.", lambda gpu: gpu.sm_clock_hz),
    _Gauge("gpu_memory_clock_hertz", "Clock of the memory.", lambda gpu: gpu.memory_clock_hz),
)


class GpuMetrics:
    """The GPUs that this process may use. Nothing is read between scrapes, and the engine is not asked.

    A driver that hangs blocks its callers, so NVML is called in a thread of its own; while one call hangs, no other
    begins, and scrapes lack these metrics.
    """

    def __init__(self, load: Callable[[], Nvml] = Nvml.load, visible: str | None = None) -> None:
        """
        Args:
            load: loads NVML; called once, at the first scrape.
            visible: names of GPUs, as in CUDA_VISIBLE_DEVICES; None for its value.
        """
        self._load = load
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._library: Nvml | None = None
        self._absent = False
        self._reading: Future[list[GpuState]] | None = None
        self._newest: list[GpuState] = []

    async def refresh(self, patience_s: float = _PATIENCE_S) -> None:
        """Read the GPUs. If that takes longer than `patience_s`, `families` has none until it succeeds."""
        self._newest = []
        if self._absent:
            return
        if self._reading is None:
            self._reading = self._begin()
        reading = self._reading
        awaited = asyncio.wrap_future(reading)
        awaited.add_done_callback(_retrieve)
        await asyncio.wait([awaited], timeout=patience_s)
        if not reading.done():
            return
        if self._reading is reading:
            self._reading = None
        error = reading.exception()
        if error is None:
            self._newest = reading.result()
        elif not self._absent:
            self._absent = True
            log.info("/metrics has no metrics of GPUs: %s", error)

    def families(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        """Yield the metrics of the newest `refresh`; none if there are no GPUs, or none was read."""
        gpus = self._newest
        if not gpus:
            return
        info = GaugeMetricFamily(f"{PREFIX}gpu_info", "A GPU's name, as a label.", labels=[*labels, *_INFO])
        for gpu in gpus:
            info.add_metric([*labels.values(), str(gpu.index), gpu.name, gpu.uuid], 1.0)
        yield info
        for gauge in _GAUGES:
            family = GaugeMetricFamily(PREFIX + gauge.name, gauge.help, labels=[*labels, "gpu"])
            for gpu in gpus:
                if (value := gauge.read(gpu)) is not None:
                    family.add_metric([*labels.values(), str(gpu.index)], value)
            yield family
        yield _slowed(gpus, labels)
        yield _errors(gpus, labels)

    def _begin(self) -> Future[list[GpuState]]:
        future: Future[list[GpuState]] = Future()

        def read() -> None:
            try:
                self._library = self._library or self._load()
                future.set_result(chosen(self._library.states(), self._visible))
            except BaseException as error:
                future.set_exception(error)

        # Not a pool's thread: Python would wait for one that hangs before it exits.
        threading.Thread(target=read, name="octavo-nvml", daemon=True).start()
        return future


_INFO = ("gpu", "name", "uuid")


def _retrieve(awaited: asyncio.Future[list[GpuState]]) -> None:
    """Retrieve an exception that comes after the scrape has given up, so that it is not logged as a fault."""
    if not awaited.cancelled():
        awaited.exception()


def _slowed(gpus: Sequence[GpuState], labels: Mapping[str, str]) -> Metric:
    text = "1 while the clocks are lowered for this reason, else 0."
    family = GaugeMetricFamily(f"{PREFIX}gpu_slowed", text, labels=[*labels, "gpu", "reason"])
    for gpu in gpus:
        for reason in SLOWED if gpu.slowed is not None else ():
            held = gpu.slowed is not None and reason in gpu.slowed
            family.add_metric([*labels.values(), str(gpu.index), reason], float(held))
    return family


def _errors(gpus: Sequence[GpuState], labels: Mapping[str, str]) -> Metric:
    text = "Errors of the memory since the driver was loaded: corrected, or uncorrected."
    family = CounterMetricFamily(f"{PREFIX}gpu_ecc_errors", text, labels=[*labels, "gpu", "kind"])
    for gpu in gpus:
        for kind, count in (("corrected", gpu.ecc_corrected), ("uncorrected", gpu.ecc_uncorrected)):
            if count is not None:
                family.add_metric([*labels.values(), str(gpu.index), kind], count)
    return family
