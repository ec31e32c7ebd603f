"""Every family that llama.cpp has, from a GGUF file as its converter writes it, against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_kit import write_model
from paged import PagedRunner
from tiny import load_model, make_checkpoint
from torch import Tensor

from octavo.hub.gguf_families import FAMILIES
from octavo.nn.attention.reference import ReferenceAttention

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 198, 1, 77, 12] * 2
WINDOWS = [True, True, False]

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bloom": ("bloom", "bloom", {}, {}),
    "chatglm": ("glm", "chatglm", {}, {}),
    "cohere2": (
        "cohere2",
        "cohere2",
        {"sliding_window_pattern": 4, "num_hidden_layers": 4},
        {"logit_scale": 0.0625, "attention__sliding_window": 7},
    ),
    "command-r": ("cohere", "command-r", {}, {"logit_scale": 0.0625}),
    "ernie": ("ernie", "ernie4_5", {}, {}),
    "exaone4": (
        "exaone4",
        "exaone4",
        {},
        {"attention__sliding_window": 7, "attention__sliding_window_pattern": WINDOWS},
    ),
    "exaone4-full": ("exaone4-full", "exaone4", {}, {}),
    "falcon": ("falcon", "falcon", {}, {}),
    "falcon-new": ("falcon-new", "falcon", {}, {}),
    "falcon-one-norm": ("falcon-one-norm", "falcon", {}, {}),
    "gemma": ("gemma", "gemma", {}, {}),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 32},
        {"attention__sliding_window": 7, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 6},
        {"attention__sliding_window": 7, "final_logit_softcapping": 5.0},
    ),
    "glm4": ("glm4", "glm4", {}, {}),
    "gpt-neox": ("gpt-neox", "gptneox", {}, {"use_parallel_residual": True}),
    "gpt-neox-serial": ("gpt-neox-serial", "gptneox", {}, {"use_parallel_residual": False}),
    "gpt2": ("gpt2", "gpt2", {}, {}),
    "granite": (
        "granite",
        "granite",
        {},
        {"embedding_scale": 3.0, "residual_scale": 0.3, "attention__scale": 0.1, "logit_scale": 4.0},
    ),
    "internlm2": ("llama", "internlm2", {}, {}),
    "exaone": ("llama", "exaone", {}, {}),
    "minicpm": (
        "granite",
        "minicpm",
        {"attention_multiplier": 0.25},
        {"embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 4.0},
    ),
    "nemotron": ("nemotron", "nemotron", {}, {}),
    "olmo": ("olmo", "olmo", {}, {"attention__clamp_kqv": 0.8}),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": (
        "olmo3",
        "olmo2",
        {},
        {"attention__sliding_window": 7, "attention__sliding_window_pattern": [True, False, True]},
    ),
    "phi2": ("phi", "phi2", {"qk_layernorm": False}, {}),
    "phi3": ("phi3", "phi3", {}, {"attention__sliding_window": 9}),
    "phi3-longrope": ("phi3-longrope", "phi3", {}, {}),
    "seed-oss": ("seed-oss", "seed_oss", {}, {}),
    "smollm3": ("smollm3", "smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}, {}),
    "stablelm": ("stablelm", "stablelm", {}, {}),
    "stablelm-parallel": ("stablelm-parallel", "stablelm", {}, {}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}, {}),
}
_COUNTS = {"expert_count": 6, "expert_used_count": 2}
_SMALLER = {**_COUNTS, "expert_feed_forward_length": 24}
_SHARED = {
    **_SMALLER,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_gating_func": 2,
}
CASES |= {
    "mixtral": ("mixtral", "llama", {"sliding_window": None}, _COUNTS),
    "qwen2moe": (
        "qwen2-moe",
        "qwen2moe",
        {"mlp_only_layers": []},
        {**_SMALLER, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": ("qwen3-moe", "qwen3moe", {}, _SMALLER),
    "dots1": ("dots1", "dots1", {}, {**_SHARED, "expert_group_count": 2, "expert_group_used_count": 1}),
    "ernie4_5-moe": (
        "ernie-moe",
        "ernie4_5-moe",
        {},
        {**_SMALLER, "expert_shared_count": 1, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    ),
    "glm4moe": ("glm4-moe", "glm4moe", {}, _SHARED),
    "gpt-oss": (
        "gpt-oss",
        "gpt-oss",
        {"swiglu_limit": 7.0},
        {**_SMALLER, "attention__sliding_window": 7, "rope__scaling__yarn_beta_fast": 8.0},
    ),
    "granitemoe": (
        "granite-moe",
        "granitemoe",
        {},
        {**_COUNTS, "attention__scale": 0.2, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0},
    ),
    "llama4": (
        "llama4",
        "llama4",
        {"no_rope_layer_interval": 4, "floor_scale": 8192, "attn_scale": 0.1},
        {
            "expert_count": 4,
            "expert_used_count": 1,
            "expert_feed_forward_length": 24,
            "interleave_moe_layer_step": 2,
            "attention__chunk_size": 12,
        },
    ),
    "olmoe": ("olmoe", "olmoe", {}, _COUNTS),
}
"""Name -> tiny configuration, architecture of the file, changed fields, and metadata that only this family has."""


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_from_a_gguf_file(case: str, tmp_path: Path) -> None:
    logits, expected = logits_of(case, tmp_path, None)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", ["cohere2", "falcon-new", "glm4", "granite", "phi3", "granitemoe"])
def test_quantized_matrices_are_arranged_as_well(case: str, tmp_path: Path) -> None:
    logits, expected = logits_of(case, tmp_path, [Kind.Q8_0, Kind.F32])
    assert torch.cosine_similarity(logits, expected, dim=-1).min() > 0.9


def logits_of(case: str, folder: Path, kinds: list[Kind] | None) -> tuple[Tensor, Tensor]:
    """Octavo's logits of a file, and those of the model that it was made from."""
    family, arch, changes, metadata = CASES[case]
    theirs = make_checkpoint(family, folder, changes)
    files = write_model(folder / "model.gguf", theirs, arch, kinds, **metadata)
    runner = PagedRunner(load_model(files, ReferenceAttention()), num_blocks=20, block_size=4)
    logits = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    with torch.no_grad():
        return logits, theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]


def test_every_architecture_is_compared() -> None:
    elsewhere = {"llama", "mistral", "qwen2", "qwen3"} | {"bert"}  # test_gguf_golden.py, test_gguf_encoders.py
    assert {arch for _, arch, _, _ in CASES.values()} | elsewhere == set(FAMILIES)
