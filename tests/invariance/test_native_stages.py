"""Stages of a pipeline that run as native programs give the tokens of one device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_kit import write_model
from rank_kit import ranks_in_threads
from test_expert_parallel import FAMILIES
from test_several_ranks import EVEN, RECURRENT, run, scored, scores_of
from toy_engine import drive, tokens_of
from toy_models import LATENT, LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.worker.native_replay import NativeReplay

IN_TORCH = "layer by layer in torch"
SLOW = pytest.mark.slow
LONGER = LLAMA | EVEN | {"num_hidden_layers": 3}
TIED = {"tie_word_embeddings": True}
TWO, THREE = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}
TWO_OF_TWO = TWO | {"tensor_parallel_size": 2}
CROWDED = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_blocks": 12, "max_model_len": 160}
"""Chunks and preemption."""
NATIVE = {"attention_backend": "native"}
FEW = {"max_model_len": 128, "max_num_seqs": 4}

made: list[NativeReplay] = []
"""Those of the ranks, in any order."""


class Watched(NativeReplay):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        made.append(self)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ranks_in_threads(monkeypatch)
    monkeypatch.setattr("octavo.worker.host_parts.NativeReplay", Watched)
    yield
    made.clear()


def in_stages(config: dict[str, Any], **settings: Any) -> dict[tuple[str, int], list[int]]:
    """Run a model in stages, and check that each rank decodes by its program."""
    made.clear()
    found = run(config, **NATIVE | settings)
    ranks, stages = settings.get("tensor_parallel_size", 1), settings["pipeline_parallel_size"]
    assert sorted(one.draws for one in made) == [False] * (stages - 1) * ranks + [True] * ranks
    assert min(one.count for one in made) > 10
    return found


@pytest.mark.parametrize(
    ("config", "division", "settings"),
    [
        (LONGER, THREE, CROWDED),
        (LONGER | TIED, TWO, {"async_scheduling": True}),
        (LONGER, TWO_OF_TWO, CROWDED),
        pytest.param(LONGER | TIED, TWO_OF_TWO, {}, marks=SLOW),
        pytest.param(LONGER | TIED, THREE, {"enable_prefix_caching": False}, marks=SLOW),
        pytest.param(LONGER, TWO | {"pipeline_layers": (1, 2)}, {"kv_cache_dtype": "int8"}, marks=SLOW),
        pytest.param(LONGER, THREE, {"dtype": "bfloat16"}, marks=SLOW),
        pytest.param(LONGER | TIED, TWO, {"dtype": "bfloat16", **CROWDED}, marks=SLOW),
    ],
)
def test_tokens(config: dict[str, Any], division: dict[str, Any], settings: dict[str, Any]) -> None:
    assert in_stages(config, **division, **settings) == run(config, **NATIVE, **settings)


FAMILY: dict[str, dict[str, Any]] = {
    "norms of embeddings, biases of heads": {"architectures": ["BloomForCausalLM"], "n_head": 4} | TIED,
    "learned positions": {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 64} | TIED,
    "scaled embeddings, capped logits": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("scaled") else SLOW) for name in FAMILY]
)
def test_what_is_around_the_layers(name: str) -> None:
    config = LONGER | {"num_key_value_heads": 4} | FAMILY[name]
    assert in_stages(config, **THREE) == run(config, **NATIVE)


@pytest.mark.parametrize("division", [TWO, pytest.param(TWO_OF_TWO, marks=SLOW)], ids=str)
def test_latent_attention(division: dict[str, Any]) -> None:
    assert in_stages(LATENT | EVEN, **division) == run(LATENT | EVEN, **NATIVE)


@pytest.mark.parametrize(
    ("name", "division"),
    [
        ("Qwen2MoeForCausalLM", TWO),
        *(pytest.param(name, TWO, marks=SLOW) for name in FAMILIES if name != "Qwen2MoeForCausalLM"),
        pytest.param("Qwen2MoeForCausalLM", TWO_OF_TWO, marks=SLOW),
        pytest.param("Qwen2MoeForCausalLM", TWO_OF_TWO | {"enable_expert_parallel": True}, marks=SLOW),
    ],
)
def test_experts(name: str, division: dict[str, Any]) -> None:
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any", "head_dim": 16}
    config |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 32}
    config |= {"kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    few = {"max_model_len": 160, "max_num_seqs": 6}
    assert in_stages(config, **division, **few) == run(config, **NATIVE, **few)


@pytest.mark.parametrize(
    ("name", "division"),
    [
        ("JambaForCausalLM", TWO),
        *(pytest.param(name, TWO, marks=SLOW) for name in RECURRENT if name != "JambaForCausalLM"),
        pytest.param("BambaForCausalLM", TWO_OF_TWO, marks=SLOW),
    ],
)
def test_recurrent_layers(name: str, division: dict[str, Any]) -> None:
    config = RECURRENT[name] | {"initializer_range": 0.3}
    assert in_stages(config, **division, **FEW) == run(config, **NATIVE, **FEW)


def test_log_probabilities_have_the_same_bits() -> None:
    """The last stage computes the steps of these requests in parts, while the others replay them."""
    alone = sorted(scored(**NATIVE), key=lambda delta: delta.id)
    divided = sorted(scored(**NATIVE, **TWO), key=lambda delta: delta.id)
    assert [one.tokens for one in alone] == [one.tokens for one in divided]
    assert [scores_of(one) for one in alone] == [scores_of(one) for one in divided]


@pytest.mark.parametrize(
    ("division", "activations"),
    [
        (TWO, "int16"),
        pytest.param(TWO, "int8", marks=SLOW),
        pytest.param(TWO, "bfloat16", marks=SLOW),
        pytest.param(TWO_OF_TWO, "int16", marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_integers_of_gguf_files(division: dict[str, Any], activations: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = LlamaForCausalLM(
        LlamaConfig(vocab_size=132, num_hidden_layers=2, head_dim=16, tie_word_embeddings=tied, **shape)
    )
    files = write_model(tmp_path / "model.gguf", theirs, "llama", [Kind.Q8_0, Kind.Q4_1])

    def greedy(**settings: Any) -> dict[tuple[str, int], list[int]]:
        small = {"max_model_len": 64, "max_num_seqs": 4, "memory_bytes": 1 << 22, "threads": 1}
        own = {"device": "cpu", "cpu_bind": "nobind", "activation_dtype": activations, **NATIVE}
        loop = build_core(EngineConfig.of(**small, **own, **settings), files)[0]
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        asked = [GenerateRequest(id=str(i), tokens=list(range(5 + i, 30)), params=params) for i in range(3)]
        found = tokens_of(drive(loop, asked))
        loop.close()
        return found

    expected = greedy()
    made.clear()
    assert greedy(**division) == expected
    assert min(one.count for one in made) > 5


@pytest.mark.parametrize("stage", [0, 1])
def test_one_stage_in_torch(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the ranks of one stage share no memory."""

    def reason_against(*args: Any, **settings: Any) -> str | None:
        return "no reason" if threading.current_thread().name == f"rank {stage}" else None

    expected = run(LONGER, **NATIVE)
    made.clear()
    for module in ("octavo.worker.worker", "octavo.models.model"):
        monkeypatch.setattr(f"{module}.reason_against", reason_against)
    assert run(LONGER, **TWO) == expected
    (replay,) = made
    assert replay.draws == (stage == 0)
    assert replay.count > 10


def test_torch_computes_stages_where_it_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    in_torch = {"attention_backend": "torch"}
    assert run(LONGER, **TWO, **in_torch) == run(LONGER, **in_torch)
    assert not made
    assert IN_TORCH not in caplog.text


def test_ranks_of_a_stage_that_share_no_memory_compute_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(LONGER, **NATIVE)
    made.clear()
    ranks_in_threads(monkeypatch, native=False)
    assert run(LONGER, **TWO_OF_TWO) == expected
    assert not made
    assert "ranks that share no memory" in caplog.text
