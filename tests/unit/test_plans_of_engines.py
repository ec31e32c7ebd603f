"""What `octavo plan` says of features, ranks and CPUs is what tiny engines have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import image_kit
import pytest
import torch
from draft_models import folder_of
from gguf import GGMLQuantizationType
from gguf_kit import write_model
from rank_kit import ranks_in_threads
from tiny import make_checkpoint, model_files
from toy_models import LLAMA

from octavo.build import build_core
from octavo.build_plan import plan_of
from octavo.build_worker import DecoderBuild
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.estimate import Estimate
from octavo.core.gpus import Gpu
from octavo.core.worker_info import LoadedFacts
from octavo.device import host
from octavo.device.cpu import CpuDevice
from octavo.engine.phases import PhaseTimer
from octavo.hub.files import ModelFiles
from octavo.hub.resolve import resolve
from octavo.worker.worker import Worker

GIB = 1 << 30
ROPES = 1 << 18
"""Bytes of tables of rotations, at most, which a plan does not count."""
SIZES: dict[str, Any] = {"device": "cpu", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def loaded(config: EngineConfig, files: ModelFiles, drafts: int = 0) -> tuple[LoadedFacts, Worker]:
    build = DecoderBuild(config, files)
    return build.load(PhaseTimer(lambda *_: None), drafts), build._worker


def check_alone(found: Estimate, config: EngineConfig, files: ModelFiles, drafts: int = 0) -> None:
    facts, worker = loaded(config, files, drafts)
    load = found.load
    assert load.weights <= facts.weight_bytes <= load.weights + ROPES
    assert load.block_besides == facts.block_bytes_besides
    assert load.token_bytes == facts.kv_bytes_per_token
    assert load.workspace == worker.workspace_bytes(8, 64, drafts) + worker.reserved.workspace


@pytest.mark.features("media")
@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl", "llava-next"])
def test_a_tower(name: str, tmp_path: Path) -> None:
    image_kit.make(name, tmp_path)
    files = model_files(tmp_path)
    config = EngineConfig.of(**SIZES, dtype="float32")
    found = plan_of(config, files, CpuDevice())
    assert found.load.besides["tower"] > 0
    check_alone(found, config, files)
    text = EngineConfig.of(**SIZES, dtype="float32", limit_mm_per_prompt={"image": 0})
    assert not plan_of(text, files, CpuDevice()).load.besides


@pytest.mark.features("speculation")
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_drafting_model(dtype: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "target", dtype=torch.bfloat16)
    make_checkpoint("llama", tmp_path / "drafter", {"num_hidden_layers": 1}, dtype=torch.bfloat16)
    files = model_files(tmp_path / "target")
    drafts = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 3}
    config = EngineConfig.of(**SIZES, dtype=dtype, speculative_config=drafts)
    found = plan_of(config, files, CpuDevice())
    assert found.load.besides["drafting model"] > 0
    assert found.load.block_besides > 0
    check_alone(found, config, files, 3)


@pytest.mark.features("speculation")
@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_drafting_head(backend: str | None, tmp_path: Path) -> None:
    folder_of(LLAMA, tmp_path / "target")
    head = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    folder_of(LLAMA | head, tmp_path / "head")
    files = resolve(str(tmp_path / "target"), weights=False)
    drafts = {"method": "eagle", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    sizes = SIZES | {"load_format": "dummy", "attention_backend": backend}
    config = EngineConfig.of(**sizes, dtype="float32", speculative_config=drafts)
    found = plan_of(config, files, CpuDevice())
    assert found.load.besides["drafting head"] > 0
    facts, worker = loaded(config, files, 3)
    assert found.load.block_besides == facts.block_bytes_besides
    assert found.load.workspace == worker.workspace_bytes(8, 64, 3) + worker.reserved.workspace
    if backend is None:
        taken = found.load.besides["drafting head"]
        assert taken <= worker.reserved.weights <= taken + ROPES
    else:  # in torch it uses the target's tables, and the plan expects kernels
        assert found.load.besides["drafting head"] > worker.reserved.weights


@pytest.mark.features("speculation")
def test_heads_of_one_token_each(tmp_path: Path) -> None:
    folder_of(LLAMA, tmp_path / "target")
    folder_of({"medusa_num_heads": 2, "medusa_num_layers": 1}, tmp_path / "heads")
    files = resolve(str(tmp_path / "target"), weights=False)
    drafts = {"method": "medusa", "model": str(tmp_path / "heads")}
    config = EngineConfig.of(**SIZES, load_format="dummy", dtype="float32", speculative_config=drafts)
    found = plan_of(config, files, CpuDevice())
    worker = loaded(config, files, 2)[1]
    biases = 2 * 64 * 4
    assert 0 <= found.load.besides["drafting heads"] - worker.reserved.weights <= biases
    assert found.load.workspace == worker.workspace_bytes(8, 64, 2) + worker.reserved.workspace


DIVISIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tensor_parallel_size": 2}),
    ("llama", {"pipeline_parallel_size": 2}),
    ("gemma3", {"pipeline_parallel_size": 2, "pipeline_layers": (1, 2)}),
    ("gemma3", {"prefill_context_parallel_size": 2}),
    ("qwen3-moe", {"tensor_parallel_size": 2}),
    ("qwen3-moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("qwen3-moe", {"data_parallel_size": 2, "enable_expert_parallel": True}),
]


@pytest.mark.parametrize(("family", "settings"), DIVISIONS)
def test_ranks(family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(family, tmp_path)
    files = model_files(tmp_path)
    config = EngineConfig.of(**SIZES, **settings, cpu_bind="nobind", dtype="float32")
    found = plan_of(config, files, CpuDevice())
    ranks_in_threads(monkeypatch)
    noted: dict[int, tuple[LoadedFacts, Worker]] = {}
    load = DecoderBuild.load

    def noting(self: DecoderBuild, timer: PhaseTimer, drafts: int = 0) -> LoadedFacts:
        facts = load(self, timer, drafts)
        noted[self._worker.place.rank] = facts, self._worker
        return facts

    monkeypatch.setattr(DecoderBuild, "load", noting)
    loop, info = build_core(config, files)
    loop.close()
    assert len(noted) == found.ranks == 2
    for facts, worker in noted.values():
        one = found.stages[worker.stage.number]
        largest = worker.mesh.rank == 0
        assert one.weights - 0.1 * one.weights * (not largest) <= facts.weight_bytes <= one.weights + ROPES
        assert one.token_bytes == facts.kv_bytes_per_token
        assert one.groups == facts.groups
        assert one.workspace == worker.workspace_bytes(8, 64, 0)
    assert info.num_blocks <= found.load.most_blocks * found.load.cache_ranks


@pytest.mark.parametrize("kinds", [["Q4_0"], ["Q8_0"], ["Q4_1", "Q5_0"]])
def test_quantized_weights_of_a_cpu(kinds: list[str], tmp_path: Path) -> None:
    model = make_checkpoint("quantized", tmp_path, {"hidden_size": 256, "intermediate_size": 256})
    files = write_model(tmp_path / "model.gguf", model, "llama", [GGMLQuantizationType[kind] for kind in kinds])
    config = EngineConfig.of(**SIZES)
    found = plan_of(config, files, CpuDevice())
    facts, _ = loaded(config, files)
    assert facts.weight_bytes <= found.load.weights + ROPES
    assert found.load.weights <= 1.6 * facts.weight_bytes


def test_what_the_cache_of_a_cpu_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path)
    files = model_files(tmp_path)
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 30)
    for settings in ({}, {"gpu_memory_utilization": 0.9}, {"kv_cache_dtype": "int8"}):
        config = EngineConfig.of(**SIZES, **settings, dtype="float32")
        found = plan_of(config, files, CpuDevice())
        facts, _ = loaded(config, files)
        assert facts.kv_budget is not None
        assert 0 <= found.load.cache - facts.kv_budget <= ROPES
        assert found.load.token_bytes == facts.kv_bytes_per_token
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 18)
    assert not plan_of(EngineConfig.of(**SIZES, dtype="float32"), files, CpuDevice()).fits


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "has no experts"),
        ({"tensor_parallel_size": 3}, "can't be divided over 3 devices"),
        ({"pipeline_parallel_size": 9}, "the model has 3 layers"),
        ({"cpu_offload_gb": 1.0, "device": "cpu"}, "--cpu-offload-gb 1 frees memory of GPUs"),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "is for GPUs"),
    ],
)
def test_what_an_engine_would_refuse(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    device = CpuDevice() if settings.get("device") == "cpu" else Gpu("some", 4 * GIB)
    with pytest.raises(ConfigError, match=says):
        plan_of(EngineConfig.of(**settings), model_files(tmp_path), device)
