"""Mixtures of experts with slots on the device, launched and recorded, give the CPU's tokens.

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
_SMALL |= {"num_hidden_layers": 2 if GPU else 1, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_DEEP = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16}
_DEEP |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 2}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": _SMALL | {"head_dim": 16, "num_experts": 4, "norm_topk_prob": True},
    "Qwen2MoeForCausalLM": _SMALL | {"num_experts": 4, "shared_expert_intermediate_size": 40},
    "MixtralForCausalLM": _SMALL | {"num_local_experts": 4},
    "OlmoeForCausalLM": _SMALL | {"num_experts": 6, "num_experts_per_tok": 5},
    "PhimoeForCausalLM": _SMALL | {"num_local_experts": 4, "router_jitter_noise": 0.01},
    "DeepseekV2ForCausalLM": _SMALL | _DEEP | {"topk_method": "greedy", "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": _SMALL | _DEEP | _GROUPS | {"q_lora_rank": 16, "norm_topk_prob": True},
    # Without gates.
    "NemotronHForCausalLM": _SMALL
    | {"layers_block_type": ["attention", "moe"], "n_routed_experts": 4, "mlp_hidden_act": "relu2", "head_dim": 16}
    | {"moe_shared_expert_intermediate_size": 40, "norm_topk_prob": True},
}
ALWAYS = (*FAMILIES,) if GPU else ("Qwen3MoeForCausalLM",)
PARAMS = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def requests() -> list[GenerateRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(count)] for count in (17, 3)]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    return [GenerateRequest(id=f"r{i}", tokens=prompt, params=params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, and padded batches. Steps with prompts are recorded, too."""
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any"}

    def tokens(**settings: Any) -> dict[tuple[str, int], list[int]]:
        chosen = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16}
        loop, _ = build_core(tiny_config(**chosen, **settings), model_files(config))
        found = tokens_of(drive(loop, requests()))
        loop.close()
        return found

    expected = tokens(device="cpu")
    replayed = recorded_graphs(monkeypatch)
    chosen = behind(monkeypatch)
    assert tokens(**chosen) == expected
    assert replayed["sample"] > 1
    assert replayed["mixed"] > 0
    if GPU:
        assert tokens(**chosen, enforce_eager=True) == expected
