"""Recurrent layers with slots on the device, launched and recorded, give the CPU's tokens.

Without a GPU the kernels run in Triton's interpreter, on few and short requests.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from toy_engine import drive, tiny_config, tokens_of
from toy_graphs import recorded_graphs
from toy_models import LLAMA, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest

GPU = torch.cuda.is_available()
_SMALL = LLAMA | {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
_SSM = {"num_heads": 2, "head_dim": 16, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba2ForCausalLM": {"vocab_size": VOCAB, "hidden_size": 16, "eos_token_id": 3, **_SSM},
    "Qwen3NextForCausalLM": _SMALL
    # Two kv heads: a state then fits into blocks of 16 tokens, and a block of the common prefix is kept.
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 0,
        "head_dim": 16,
        "num_key_value_heads": 2,
    }
    | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "Lfm2ForCausalLM": _SMALL | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "JambaForCausalLM": _SMALL | {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
}
ALWAYS = (*FAMILIES,) if GPU else ("Mamba2ForCausalLM",)
PARAMS = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def requests() -> list[GenerateRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(count)] for count in (20, 3)]
    prompts.append([*prompts[0][:18], 7, 9])
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    return [GenerateRequest(id=f"r{i}", tokens=prompt, params=params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, prefix hits on kept states, and padded batches. Steps of 16 tokens with prompts are recorded, too."""
    monkeypatch.setattr("octavo.nn.state.SNAPSHOT_TOKENS", 16)
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any"}

    def tokens(**settings: Any) -> dict[tuple[str, int], list[int]]:
        chosen = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 12 if name in ALWAYS else 16}
        loop, _ = build_core(tiny_config(**chosen, **settings), model_files(config))
        found = tokens_of(drive(loop, requests()))
        assert loop.stats().prefix_cache_hits > 0
        loop.close()
        return found

    expected = tokens(device="cpu")
    replayed = recorded_graphs(monkeypatch)
    assert tokens(**behind(monkeypatch)) == expected
    assert replayed["sample"] > 1
