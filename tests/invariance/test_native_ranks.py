"""A native program that is divided over ranks gives the tokens of one device."""

from __future__ import annotations

from typing import Any

import pytest
from rank_kit import ranks_in_threads
from test_expert_parallel import FAMILIES
from test_rank import CROWDED
from test_several_ranks import EVEN, run
from toy_models import LLAMA, QWEN3

IN_TORCH = "layer by layer in torch"
TWO = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("config", [LLAMA | EVEN | {"tie_word_embeddings": True}, QWEN3], ids=["Llama", "Qwen3"])
def test_crowded_engine(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_in_threads(monkeypatch)
    assert run(config, **TWO, **CROWDED) == run(config, **CROWDED)
    assert IN_TORCH not in caplog.text


@pytest.mark.parametrize("name", ["Qwen2MoeForCausalLM", pytest.param("GptOssForCausalLM", marks=pytest.mark.slow)])
def test_divided_experts(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ranks_in_threads(monkeypatch)
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any", "head_dim": 16}
    config |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 32}
    few = {"max_model_len": 160, "max_num_seqs": 6}
    assert run(config, **TWO, **few) == run(config, **few)
    assert IN_TORCH not in caplog.text


def test_ranks_that_share_no_memory_compute_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_in_threads(monkeypatch, native=False)
    assert run(LLAMA | EVEN, **TWO) == run(LLAMA | EVEN)
    assert f"{IN_TORCH} instead" in caplog.text
    assert "ranks that share no memory" in caplog.text
