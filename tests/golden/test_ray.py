"""A Ray cluster of two nodes, both on this machine: the tokens of one device, a lost node, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import toy_models
from ray.cluster_utils import Cluster
from toy_engine import drive, tokens_of

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError, DeviceLostError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.ray_nodes import RayNodes, fewest_machines
from octavo.text.sources import model_files

_MEMORY = {"object_store_memory": 80 << 20}
_ON_RAY = {"distributed_executor_backend": "ray"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with a CPU each; nothing else of Ray runs in this process."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **_MEMORY})
    cluster.add_node(num_cpus=1, **_MEMORY)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def engine(model: str, **settings: Any) -> EngineLoop:
    few = {"device": "cpu", "dtype": "float32", "threads": 1, "cpu_bind": "nobind", "memory_bytes": 4 << 20}
    config = EngineConfig.of(model=model, **few, **settings)
    return build_core(config, model_files(config.model))[0]


def requests(max_tokens: int) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [GenerateRequest(id=str(i), tokens=list(range(5 + i, 17)), params=params) for i in range(4)]


def test_ranks_on_two_nodes_and_the_loss_of_one(cluster: Cluster, tmp_path: Any) -> None:
    model = str(toy_models.save_decoder(tmp_path / "model", seed=1))
    expected = tokens_of(drive(engine(model), requests(9)))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match=r"4 ranks need as many CPUs, .* cluster have 1, 1\. Lower --tensor-parallel"):
        engine(model, tensor_parallel_size=4, **_ON_RAY)
    loop = engine(model, tensor_parallel_size=2, **_ON_RAY)
    assert signal.getsignal(signal.SIGTERM) == before
    assert tokens_of(drive(loop, requests(9))) == expected
    for request in requests(100):
        loop.add(request)
    loop.step()
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    with pytest.raises(DeviceLostError, match=r"The device was lost: rank [01] on node [01] \(.*\): its node has"):
        tokens_of(drive(loop, []))
    loop.close()


@pytest.mark.slow
def test_stages_on_two_nodes_end_with_the_engine(cluster: Cluster, tmp_path: Any) -> None:
    model = str(toy_models.save_decoder(tmp_path / "model", seed=1))
    loop = engine(model, pipeline_parallel_size=2, **_ON_RAY)
    assert tokens_of(drive(loop, requests(9))) == tokens_of(drive(engine(model), requests(9)))
    loop.close()
    again = RayNodes(2, 1, "cpu", patience_s=20)  # the devices are free
    assert again.count == 2
    again.close()


@pytest.mark.slow
def test_a_machine_that_fails_to_start_is_reported(cluster: Cluster) -> None:
    with contextlib.closing(RayNodes(2, 1, "cpu")) as nodes:
        nodes.start([partial(fewest_machines, [], 3, "GPU")] * 2)
        said = r"machine [01] could not start its ranks: .* 3 ranks need as many GPUs"
        with pytest.raises(ConfigError, match=said):
            all(nodes.check() is None for _ in itertools.count())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "127.0.0.1:1",
            r"no Ray cluster at RAY_ADDRESS=127\.0\.0\.1:1 \(.*refused.*\)\. Start one with ray start --head",
        ),
        ("ray://127.0.0.1:1", r"RAY_ADDRESS=ray://127\.0\.0\.1:1 is Ray Client's"),
    ],
)
def test_without_a_cluster_the_error_says_how_to_start_one(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=said):
        RayNodes(2, 1, "cpu")


@pytest.mark.parametrize(
    ("devices", "ranks", "machines"),
    [
        ([8.0], 8, 1),
        ([4.0, 4.0], 8, 2),
        ([8.0, 4.0], 8, 1),
        ([3.0, 3.0], 4, 2),
        ([2.0, 2.0, 2.0], 6, 3),
        ([0.0, 2.0], 2, 1),
    ],
)
def test_as_few_machines_as_have_the_devices(devices: list[float], ranks: int, machines: int) -> None:
    assert fewest_machines(devices, ranks, "GPU") == machines


@pytest.mark.parametrize(("devices", "ranks"), [([3.0, 1.0], 4), ([], 1), ([2.0, 2.0], 3)])
def test_too_few_devices_are_an_error(devices: list[float], ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"{ranks} ranks need as many GPUs"):
        fewest_machines(devices, ranks, "GPU")
