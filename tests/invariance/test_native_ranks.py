"""A native program that is divided over ranks gives the tokens of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_kit import write_model
from rank_kit import ranks_in_threads
from test_expert_parallel import FAMILIES
from test_rank import CROWDED
from test_several_ranks import EVEN, RECURRENT, run
from toy_engine import drive, tokens_of
from toy_models import LLAMA, QWEN3
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest

IN_TORCH = "layer by layer in torch"
TWO = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("config", [LLAMA | EVEN | {"tie_word_embeddings": True}, QWEN3], ids=["Llama", "Qwen3"])
def test_crowded_engine(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_in_threads(monkeypatch)
    assert run(config, **TWO, **CROWDED) == run(config, **CROWDED)
    assert IN_TORCH not in caplog.text


UNLIKE_HEADS: dict[str, dict[str, Any]] = {
    "slopes by head": {"architectures": ["BloomForCausalLM"], "n_head": 4, "num_key_value_heads": 4},
    "norms with weights by head": {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
}


@pytest.mark.parametrize("changes", UNLIKE_HEADS.values(), ids=UNLIKE_HEADS)
def test_heads_that_are_not_alike(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_in_threads(monkeypatch)
    config = LLAMA | EVEN | changes
    assert run(config, **TWO) == run(config)
    assert IN_TORCH not in caplog.text


def test_one_norm_over_the_heads_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_in_threads(monkeypatch)
    config = LLAMA | EVEN | {"architectures": ["Olmo2ForCausalLM"]}
    assert run(config, **TWO) == run(config)
    assert f"{IN_TORCH} instead" in caplog.text


@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole"])
@pytest.mark.parametrize("name", ["Qwen2MoeForCausalLM", pytest.param("GptOssForCausalLM", marks=pytest.mark.slow)])
def test_experts(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ranks_in_threads(monkeypatch)
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any", "head_dim": 16}
    config |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 32}
    few = {"max_model_len": 160, "max_num_seqs": 6}
    assert run(config, **TWO, **few, enable_expert_parallel=whole) == run(config, **few)
    assert IN_TORCH not in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        *("one group", "JambaForCausalLM"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in RECURRENT
            if name not in ("one group", "JambaForCausalLM")
        ),
    ],
)
def test_recurrent_layers(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With sums over ranks within a layer: of Mamba's step sizes, and of squares of a group that ranks divide."""
    ranks_in_threads(monkeypatch)
    config = RECURRENT[name] | {"initializer_range": 0.3}
    few = {"max_model_len": 128, "max_num_seqs": 4}
    assert run(config, **TWO, **few) == run(config, **few)
    assert IN_TORCH not in caplog.text


def test_ranks_that_share_no_memory_compute_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_in_threads(monkeypatch, native=False)
    assert run(LLAMA | EVEN, **TWO) == run(LLAMA | EVEN)
    assert f"{IN_TORCH} instead" in caplog.text
    assert "ranks that share no memory" in caplog.text


def test_integers_of_gguf_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank has a part of the blocks; the table is divided in panels."""
    ranks_in_threads(monkeypatch)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=132, num_hidden_layers=2, head_dim=16, **shape))
    files = write_model(tmp_path / "model.gguf", theirs, "llama", [Kind.Q8_0, Kind.Q4_1])

    def greedy(**settings: Any) -> dict[tuple[str, int], list[int]]:
        settings = {"max_model_len": 64, "max_num_seqs": 4, "memory_bytes": 1 << 22, "threads": 1} | settings
        loop = build_core(EngineConfig.of(device="cpu", cpu_bind="nobind", **settings), files)[0]
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        asked = [GenerateRequest(id=str(i), tokens=list(range(5 + i, 30)), params=params) for i in range(3)]
        found = tokens_of(drive(loop, asked))
        loop.close()
        return found

    assert greedy(**TWO) == greedy()
    assert IN_TORCH not in caplog.text
