"""What ranks can't divide is refused before their processes start."""

from __future__ import annotations

from typing import Any

import pytest
import toy_models
import transformers

from octavo.build import build_core
from octavo.build_worker import settings_digest
from octavo.config import EngineConfig, ParallelConfig
from octavo.core.errors import ConfigError
from octavo.engine.rank_group import RankGroup
from octavo.models.registry import spec_of
from octavo.python_api.replicas import check_replicas
from octavo.worker.division import check_division

MAMBA = transformers.MambaConfig(vocab_size=131, hidden_size=64, num_hidden_layers=2).to_dict()
MAMBA |= {"architectures": ["MambaForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (toy_models.LLAMA, {"tensor_parallel_size": 3}, "--tensor-parallel-size 3: 4 attention heads .*allow 1, 2, 4"),
        (toy_models.LLAMA, {"pipeline_parallel_size": 9}, "--pipeline-parallel-size 9: the model has 2 layers"),
        (toy_models.LLAMA, {"pipeline_parallel_size": 2, "pipeline_layers": (3, 1)}, "--pipeline-layers 3,1 does not"),
        (MAMBA, {"prefill_context_parallel_size": 2}, "recurrent layers.*or set --tensor-parallel-size"),
        (MAMBA, {"tensor_parallel_size": 2, "enable_dbo": True}, "--enable-dbo: .*recurrent layers.* Leave it out"),
    ],
)
def test_divisions_that_can_not_be(
    config: dict[str, Any], settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankGroup, "__init__", lambda *_: pytest.fail("ranks are started"))
    asked = EngineConfig.of(load_format="dummy", device="cpu", threads=1, **settings)
    with pytest.raises(ConfigError, match=says):
        build_core(asked, toy_models.model_files(config))


@pytest.mark.parametrize("config", [toy_models.LLAMA, toy_models.LATENT, MAMBA], ids=["heads", "latents", "channels"])
@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_divisions_that_can_be(config: dict[str, Any], settings: dict[str, Any]) -> None:
    check_division(spec_of(toy_models.model_files(config).config), ParallelConfig(**settings))


@pytest.mark.parametrize(
    ("device", "gpus", "says"),
    [
        ("cuda", 0, "--device cuda needs an NVIDIA GPU"),
        ("auto", 1, "--tensor-parallel-size 2 needs 2 GPUs, but CUDA_VISIBLE_DEVICES=0 names 1"),
    ],
)
def test_ranks_need_a_gpu_each(device: str, gpus: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "__init__", lambda *_: pytest.fail("ranks are started"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    asked = EngineConfig.of(load_format="dummy", device=device, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=says):
        build_core(asked, toy_models.model_files())


def test_replicas_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    asked = EngineConfig.of(device="cuda", data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--data-parallel-size 2 --tensor-parallel-size 2 needs 4 GPUs"):
        check_replicas(asked)
    check_replicas(EngineConfig.of(device="cpu", data_parallel_size=4))


@pytest.mark.parametrize("settings", [{"max_num_seqs": 3}, {"node_key": "k"}, {"attention_backend": "torch"}])
def test_machines_with_other_settings_do_not_join(settings: dict[str, Any]) -> None:
    files = toy_models.model_files(toy_models.LLAMA)
    two = settings_digest(EngineConfig.of(nnodes=2), files)
    assert settings_digest(EngineConfig.of(nnodes=2, **settings), files) != two
    own = {"node_rank": 1, "master_addr": "10.0.0.1", "model": "elsewhere", "threads": 3, "record_steps": "here"}
    assert settings_digest(EngineConfig.of(nnodes=2, **own), files) == two


@pytest.mark.features("lora")
@pytest.mark.parametrize("settings", [{}, {"max_lora_rank": 8}, {"lora_modules": ["b=/adapters/a"]}])
def test_machines_with_other_settings_of_features_do_not_join(settings: dict[str, Any]) -> None:
    """A rank would compute other layers than its fellows. Each machine has files in its own place."""
    files = toy_models.model_files(toy_models.LLAMA)
    lora = {"enable_lora": True, "max_lora_rank": 16, "lora_modules": ["a=/adapters/a"]}
    one = settings_digest(EngineConfig.of(nnodes=2, **lora), files)
    assert settings_digest(EngineConfig.of(nnodes=2, **(lora | settings if settings else {})), files) != one
    assert settings_digest(EngineConfig.of(nnodes=2, **(lora | {"lora_modules": ["a=/elsewhere/b"]})), files) == one
