"""The sizes that `octavo plan` states are those that a worker has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_checkpoint, model_files

from octavo.build_worker import DecoderBuild
from octavo.config import EngineConfig
from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.errors import ConfigError
from octavo.core.estimate import Estimate, Load, Parameters
from octavo.core.gpus import GPUS, Gpu, known_as
from octavo.engine.phases import PhaseTimer
from octavo.worker.estimate import estimate_of

GIB = 1 << 30


FAMILIES = ["llama", "gemma3", "qwen3-moe", "deepseek-v3", "jamba", "mamba", "lfm2"]


@pytest.mark.parametrize("family", [*FAMILIES, "gemma4", "gemma4-small", "gemma4-experts"])
def test_sizes_are_those_of_a_worker(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    files = model_files(tmp_path)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    found = estimate_of(EngineConfig.of(dtype="float32", **limits), files, Gpu("some", 4 * GIB))
    build = DecoderBuild(EngineConfig.of(dtype="float32", device="cpu", threads=1, **limits), files)
    loaded = build.load(PhaseTimer(lambda *_: None))
    worker = build._worker
    load = found.load
    assert load.token_bytes == loaded.kv_bytes_per_token
    assert load.block_size == loaded.block_size
    assert load.groups == loaded.groups
    assert load.workspace == worker.workspace_bytes(8, 64, 0)
    stored = _stored(tmp_path)
    plain = sum(tensor.numel() for name, tensor in stored.items() if "rotary" not in name)
    # Keys that are the values too are in memory twice.
    plain += sum(tensor.numel() for name, tensor in stored.items() if _serves_as_values(name, stored))
    assert found.parameters.count == plain
    assert found.parameters.total == plain * 4


def _serves_as_values(name: str, stored: dict[str, torch.Tensor]) -> bool:
    return ".k_proj." in name and name.replace(".k_proj.", ".v_proj.") not in stored


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_ranks_and_formats_divide_the_weights(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    files, gpu = model_files(tmp_path), Gpu("some", 4 * GIB)
    whole = estimate_of(EngineConfig.of(dtype="bfloat16"), files, gpu)
    half = estimate_of(EngineConfig.of(dtype="bfloat16", tensor_parallel_size=2), files, gpu)
    assert whole.parameters.total / 2 <= half.parameters.total < whole.parameters.total * 0.7
    assert half.parameters.count == whole.parameters.count
    assert half.load.token_bytes == whole.load.token_bytes / 2
    rounded = estimate_of(EngineConfig.of(dtype="bfloat16", quantization="w4a16"), files, gpu)
    assert rounded.parameters.total < whole.parameters.total * 0.7


def test_offloaded_layers_are_those_of_the_worker(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, {"num_hidden_layers": 6})
    files, gpu = model_files(tmp_path), GPUS["4090"]
    whole = estimate_of(EngineConfig.of(dtype="float32"), files, gpu)
    found = estimate_of(EngineConfig.of(dtype="float32", cpu_offload_gb=1 / GIB), files, gpu)
    layer = found.load.copied / 3
    assert found.load.freed == layer
    assert found.load.cache - whole.load.cache == found.load.freed
    assert found.decode_rate(1, 100) == gpu.host_bandwidth / found.load.copied


def estimate(of_all: dict[str, Any] | None = None, **changes: Any) -> Estimate:
    """Of a model of 10 GB of weights, on a GPU that reads 1 TB and computes 100 T a second."""
    return Estimate(**{"stages": [load(**changes)], "max_position": 65536} | (of_all or {}))


def load(**changes: Any) -> Load:
    gpu = Gpu("some", 24 * GIB, 1e12, 1e14, 1e10)
    parameters = Parameters(5 * 10**9, 5 * 10**9, {"all": 10**10}, 10**10)
    given: dict[str, Any] = {
        "gpu": gpu,
        "ranks": 1,
        "parameters": parameters,
        "freed": 0,
        "copied": 0,
        "room": 22 * GIB,
        "workspace": GIB,
        "limits": (256, 2048),
        "groups": [CacheGroup(layers=(0, 1))],
        "block_size": 16,
        "token_bytes": 200_000,
        "kept": [(CacheGroup(), 100_000)] * 2,
    }
    return Load(**given | changes)


def test_rates_are_bound_by_what_takes_longest() -> None:
    one = estimate()
    assert one.decode_rate(1, 1000) == pytest.approx(1 / ((10**10 + 1000 * 200_000) / 1e12))
    cacheless = estimate(kept=[])
    assert cacheless.decode_rate(200, 1) == pytest.approx(200 / max(0.01, 200 * 10**10 / 1e14))
    assert one.prompt_rate() == pytest.approx(1e14 / 10**10)
    assert estimate(copied=10**9).decode_rate(1, 1) == pytest.approx(10)
    assert estimate(gpu=Gpu("unknown", 24 * GIB)).decode_rate(1, 1) is None


def test_windows_and_states_are_read_as_far_as_they_reach() -> None:
    window = CacheGroup(GroupKind.WINDOW, window=100)
    state = CacheGroup(GroupKind.STATE)
    one = estimate(kept=[(window, 10**6), (state, 3 * 10**6)])
    assert one.decode_rate(1, 5000) == pytest.approx(1 / ((10**10 + 10**8 + 6 * 10**6) / 1e12))


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    some = Parameters(0, 0, {"all": 10}, 4, experts=64, chosen=2, choices=8)
    assert some.read(1) == 4 + 64 * 2 / 8
    assert some.read(2) == pytest.approx(4 + 64 * (1 - (6 / 8) ** 2))
    assert some.read(1000) == pytest.approx(68)


def test_what_is_missing_is_what_must_be_freed() -> None:
    small = estimate(room=13 * GIB)
    assert small.missing > 0
    assert estimate(room=13 * GIB, freed=small.missing).missing == 0
    assert estimate(room=13 * GIB, freed=small.missing - small.load.fit.block_bytes).missing > 0


def test_requests_at_once_fit_the_cache() -> None:
    one = estimate()
    count = one.at_once(4096)
    fit = one.load.fit
    assert count * fit.held(4096) <= fit.most_blocks < (count + 1) * fit.held(4096)
    assert estimate(limits=(2, 2048)).at_once(16) == 2


def test_stages_compute_different_requests_at_once() -> None:
    """One stream passes both stages after each other; of several, each stage has half."""
    halves = {"stages": [load(kept=[], ranks=2), load(kept=[], ranks=2)]}
    two = estimate(halves)
    assert two.decode_rate(1, 1) == pytest.approx(1 / 0.02)
    assert two.decode_rate(64, 1) == pytest.approx(64 / 0.02)
    unlike = estimate({"stages": [load(kept=[], ranks=2), load(kept=[], ranks=2, copied=3 * 10**8)]})
    assert unlike.decode_rate(1, 1) == pytest.approx(1 / 0.04)
    assert unlike.decode_rate(64, 1) == pytest.approx(64 / 0.06)
    assert unlike.prompt_rate() == pytest.approx(2 * 1e14 / 10**10)


def test_the_fullest_stage_decides() -> None:
    small, large = load(ranks=2, token_bytes=100_000), load(ranks=2, token_bytes=400_000)
    two = estimate({"stages": [small, large]})
    assert two.fullest == 1
    assert two.at_once(4096) == large.fit.most_blocks // large.fit.held(4096)
    without = estimate({"stages": [load(ranks=2, token_bytes=0, room=9 * 10**9), small]})
    assert without.fullest == 0
    assert without.missing > 0


def test_replicas_and_ranks_with_requests_of_their_own() -> None:
    one = estimate(kept=[(CacheGroup(), 10**6)])
    three = estimate({"replicas": 3}, kept=[(CacheGroup(), 10**6)])
    assert three.ranks == 3
    assert three.at_once(4096) == 3 * one.at_once(4096)
    assert three.decode_rate(48, 1000) == pytest.approx(3 * one.decode_rate(16, 1000))  # type: ignore[operator]
    assert three.decode_rate(1, 1000) == one.decode_rate(1, 1000)
    own = estimate(kept=[(CacheGroup(), 10**6)], ranks=4, cache_ranks=4)
    assert own.at_once(4096) == min(256, 4 * one.at_once(4096))
    assert own.decode_rate(16, 1000) == pytest.approx(16 / ((10**10 + 4 * 10**9) / 1e12))


def test_contexts_divide_prompts() -> None:
    assert estimate({"contexts": 2}).prompt_rate() == pytest.approx(2 * 1e14 / 10**10)
    assert estimate({"contexts": 2}).decode_rate(1, 1) == estimate().decode_rate(1, 1)


def test_weights_in_the_host_are_those_of_all_ranks_of_a_machine() -> None:
    found = estimate({"neighbours": 4, "host_free": 5 * GIB}, copied=GIB)
    assert found.fits
    assert not estimate({"neighbours": 8, "host_free": 5 * GIB}, copied=GIB).fits
    assert estimate({"neighbours": 8}, copied=GIB).fits


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cpu_offload_gb": 900.0}, "--cpu-offload-gb 900: all layers free"),
    ],
)
def test_settings_that_it_does_not_take(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=says):
        estimate_of(EngineConfig.of(**settings), model_files(tmp_path), GPUS["h100"])


def test_names_of_drivers() -> None:
    assert known_as("NVIDIA H200") is GPUS["h200"]
    assert known_as("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert known_as("NVIDIA H100 PCIe") is GPUS["h100-pcie"]
    assert known_as("NVIDIA GeForce RTX 4090") is GPUS["4090"]
    assert known_as("NVIDIA L4") is GPUS["l4"]
    assert known_as("NVIDIA L40S") is GPUS["l40s"]
    assert known_as("Radeon") is None
