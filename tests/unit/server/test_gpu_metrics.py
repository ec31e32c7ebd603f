"""/metrics tells what the GPUs do, and never waits long for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from nvml_kit import FakeGpu, FakeNvml
from prometheus_client.parser import text_string_to_metric_families
from server_kit import House, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.nvml import SLOWED, Nvml, NvmlError
from octavo.server.metrics import metrics
from octavo.server.metrics.gpus import GpuMetrics

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def samples(house: House) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels besides the model's name) -> value, of GPUs."""
    text = get_now(house.app, "/metrics").body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "gpu" in sample.labels:
                assert sample.labels.pop("model_name") == "m"
                found[sample.name, tuple(sample.labels.items())] = sample.value
    return found


@pytest.fixture
def library() -> FakeNvml:
    return FakeNvml(FakeGpu(slowed=SLOWED["thermal"]), FakeGpu(uuid="GPU-1b", busy=None, ecc=None, slowed=None))


def gpu_house(monkeypatch: pytest.MonkeyPatch, gpus: GpuMetrics) -> House:
    monkeypatch.setattr(metrics, "GpuMetrics", lambda: gpus)
    return make_house(saying("hi"), ServerConfig(served_model_name=("m",)), accelerator="cuda")


def test_what_gpus_report_is_served(monkeypatch: pytest.MonkeyPatch, library: FakeNvml) -> None:
    found = samples(gpu_house(monkeypatch, GpuMetrics(lambda: Nvml(library), "0,1")))
    first, second = (("gpu", "0"),), (("gpu", "1"),)
    assert found["octavo:gpu_utilization", first] == 0.75
    assert found["octavo:gpu_memory_used_bytes", first] == 20 * 2**30
    assert found["octavo:gpu_power_watts", first] == pytest.approx(512.345)
    assert found["octavo:gpu_temperature_celsius", first] == 61
    assert found["octavo:gpu_sm_clock_hertz", first] == 1980e6
    assert found["octavo:gpu_slowed", (*first, ("reason", "thermal"))] == 1
    assert found["octavo:gpu_slowed", (*first, ("reason", "power_cap"))] == 0
    assert found["octavo:gpu_ecc_errors_total", (*first, ("kind", "corrected"))] == 3
    assert found["octavo:gpu_info", (*second, ("name", "NVIDIA H200"), ("uuid", "GPU-1b"))] == 1
    # It does not report how busy it is, so there is no sample rather than a zero.
    assert ("octavo:gpu_utilization", second) not in found
    assert ("octavo:gpu_memory_used_bytes", second) in found


def test_only_gpus_that_the_server_may_use(monkeypatch: pytest.MonkeyPatch, library: FakeNvml) -> None:
    found = samples(gpu_house(monkeypatch, GpuMetrics(lambda: Nvml(library), "GPU-1b")))
    assert {dict(labels)["gpu"] for _, labels in found} == {"1"}


def test_an_engine_on_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise AssertionError("NVML is not needed")

    monkeypatch.setattr(metrics, "GpuMetrics", refuse)
    assert samples(make_house(saying("hi"), ServerConfig(served_model_name=("m",)))) == {}


def test_without_the_library_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def missing() -> Nvml:
        tried.append(1)
        raise NvmlError("libnvidia-ml.so.1 can't be loaded")

    caplog.set_level(logging.INFO)
    house = gpu_house(monkeypatch, GpuMetrics(missing))
    assert samples(house) == samples(house) == {}
    assert len(tried) == 1
    assert [line for line in caplog.messages if "libnvidia-ml" in line] == [
        "/metrics has no metrics of GPUs: libnvidia-ml.so.1 can't be loaded"
    ]


def test_a_driver_that_hangs_delays_no_scrape_for_long(library: FakeNvml) -> None:
    """While a call hangs there are no metrics, and no second call; when it returns, they are back."""
    released, calls = threading.Event(), []

    def hang() -> None:
        calls.append(1)
        released.wait()

    library.before = hang
    gpus = GpuMetrics(lambda: Nvml(library), "0,1")

    async def scrape(patience_s: float) -> list[Any]:
        await gpus.refresh(patience_s)
        return list(gpus.families({}))

    async def scrapes() -> None:
        assert await scrape(0.01) == []
        assert await scrape(0.01) == []
        assert len(calls) == 1
        released.set()
        assert len(await scrape(60)) > 5
        library.before = lambda: None
        assert len(await scrape(60)) > 5

    asyncio.run(scrapes())


def test_the_docs_name_every_metric_of_gpus(library: FakeNvml) -> None:
    gpus = GpuMetrics(lambda: Nvml(library), "0,1")
    asyncio.run(gpus.refresh())
    text = DOCUMENT.read_text(encoding="utf-8")
    families = list(gpus.families({}))
    assert families
    for family in families:
        assert f"`{family.name.removeprefix('octavo:')}`" in text
        assert family.documentation in text
