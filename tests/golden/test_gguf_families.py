"""Every family that llama.cpp has, from a GGUF file as its converter writes it, against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_kit import write_model
from paged import PagedRunner
from tiny import load_model, make_checkpoint, reference_of
from tiny_families import _MSCALE
from torch import Tensor

from octavo.hub.gguf_families import FAMILIES
from octavo.models.model import compiled
from octavo.models.native import NativeDecoder
from octavo.native.bindings import Dtype
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.experts import ExpertLayer
from octavo.nn.quant.blocks import BlockQuantized

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 198, 1, 77, 12] * 2
WINDOWS = [True, True, False]
WINDOW = "sliding_attention"

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
_LATENT = {
    "attention__kv_lora_rank": 48,
    "rope__dimension_count": 16,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.7,
}
_APART = {"attention__key_length": 64, "attention__value_length": 48, "attention__key_length_mla": 48}
_PLAIN = {"rope_type": "default", "rope_theta": 500.0}
_STATES = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 8}
_NEXT = {
    **_SMALLER,
    "expert_shared_feed_forward_length": 40,
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 96,
    "ssm__state_size": 16,
    "ssm__time_step_rank": 4,
    "ssm__group_count": 2,
}
_DELTA = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 192,
    "ssm__state_size": 16,
    "ssm__time_step_rank": 6,
    "ssm__group_count": 2,
    "rope__dimension_sections": [3, 3, 2, 0],
}
CASES |= {
    "deepseek2-lite": (
        "deepseek-v2-lite",
        "deepseek2",
        {},
        {**_LATENT, "attention__key_length": 48, "attention__value_length": 48, "attention__head_count_kv": 4},
    ),
    "afmoe": (
        "afmoe",
        "afmoe",
        {"attention_bias": False, "num_hidden_layers": 4, "layer_types": [*[WINDOW] * 3, "full_attention"]},
        {**_SHARED, "attention__sliding_window": 7},
    ),
    "apertus": ("apertus", "apertus", {"attention_bias": False, "rope_parameters": _PLAIN}, {}),
    "arcee": ("arcee", "arcee", {"attention_bias": False}, {}),
    "exaone-moe": (
        "exaone-moe",
        "exaone-moe",
        {},
        {
            **_SHARED,
            "expert_weights_scale": 2.5,
            "attention__sliding_window": 7,
            "attention__sliding_window_pattern": [True, False],
        },
    ),
    "hunyuan-dense": ("hunyuan", "hunyuan-dense", {"attention_bias": False, "rope_parameters": _PLAIN}, {}),
    "hunyuan-moe": ("hunyuan-moe", "hunyuan-moe", {}, {**_SMALLER, "expert_shared_count": 1}),
    "jais2": ("jais2", "jais2", {}, {}),
    "minimax-m2": ("minimax-m2", "minimax-m2", {}, {**_SMALLER, "expert_gating_func": 2, "rope__dimension_count": 8}),
    "solar-open": (
        "solar-open",
        "glm4moe",
        {"attention_bias": False},
        {**_SHARED, "leading_dense_block_count": 0, "feed_forward_length": 24, "rope__dimension_count": 16},
    ),
    "glm4-moe-lite": (
        "glm4-moe-lite",
        "deepseek2",
        {},
        {
            **_LATENT,
            **_APART,
            "attention__value_length_mla": 48,
            "attention__head_count_kv": 1,
            "attention__q_lora_rank": 32,
            **_SHARED,
        },
    ),
    "deepseek2-v3": (
        "deepseek-v3",
        "deepseek2",
        {"rope_parameters": {**_MSCALE, "mscale": 1.2}},
        {
            **_LATENT,
            **_APART,
            "attention__value_length_mla": 48,
            "attention__head_count_kv": 1,
            "attention__q_lora_rank": 32,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope__scaling__yarn_log_multiplier": 0.12,
            "rope__scaling__yarn_beta_fast": 8.0,
        },
    ),
    "lfm2": (
        "lfm2",
        "lfm2",
        {"conv_bias": False, "block_auto_adjust_ff_dim": False},
        {"shortconv__l_cache": 3, "attention__head_count_kv": [0, 2, 0]},
    ),
    "lfm2moe": (
        "lfm2-moe",
        "lfm2moe",
        {},
        {
            **_SMALLER,
            "shortconv__l_cache": 3,
            "attention__head_count_kv": [0, 2],
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
        },
    ),
    "mamba": ("mamba", "mamba", {"intermediate_size": 128}, {**_STATES, "ssm__time_step_rank": 4}),
    "falcon-mamba": (
        "falcon-mamba",
        "mamba",
        {"mixer_rms_eps": 1e-5, "intermediate_size": 128},
        {**_STATES, "ssm__time_step_rank": 4, "ssm__dt_b_c_rms": True},
    ),
    "mamba2": (
        "mamba2",
        "mamba2",
        {"time_step_limit": (0.0, float("inf"))},
        {**_STATES, "ssm__time_step_rank": 8, "ssm__group_count": 2},
    ),
    "jamba": ("jamba", "jamba", {}, {**_STATES, "ssm__time_step_rank": 5, "attention__head_count_kv": [0, 2, 0]}),
    "jamba-moe": (
        "jamba-moe",
        "jamba",
        {},
        {
            **_STATES,
            "ssm__time_step_rank": 5,
            "attention__head_count_kv": [0, 2],
            "expert_count": 4,
            "expert_used_count": 2,
        },
    ),
    "granitehybrid": (
        "granite-hybrid",
        "granitehybrid",
        {"mamba_proj_bias": False},
        {
            **_STATES,
            "ssm__time_step_rank": 8,
            "ssm__group_count": 2,
            "attention__head_count_kv": [0, 2, 0],
            "feed_forward_length": 80,
            "embedding_scale": 3.0,
            "residual_scale": 0.3,
            "attention__scale": 0.1,
            "logit_scale": 4.0,
        },
    ),
    "granitehybrid-moe": (
        "granite-hybrid-moe",
        "granitehybrid",
        {},
        {
            **_STATES,
            **_COUNTS,
            "ssm__time_step_rank": 8,
            "ssm__group_count": 2,
            "attention__head_count_kv": [0, 2],
            "expert_shared_feed_forward_length": 40,
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
            "attention__scale": 1.0,
            "logit_scale": 1.0,
        },
    ),
    "nemotron_h": (
        "nemotron-h",
        "nemotron_h",
        {},
        {
            **_STATES,
            "ssm__time_step_rank": 8,
            "ssm__group_count": 2,
            "attention__head_count_kv": [0, 0, 2, 0, 0],
            "feed_forward_length": [0, 112, 0, 112, 0],
        },
    ),
    "nemotron_h_moe": (
        "nemotron-h-moe",
        "nemotron_h_moe",
        {},
        {
            **_STATES,
            **_SHARED,
            "ssm__time_step_rank": 8,
            "ssm__group_count": 2,
            "attention__head_count_kv": [0, 0, 2],
            "feed_forward_length": [0, 112, 0],
            "expert_shared_feed_forward_length": 40,
        },
    ),
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
    "granitemoe-shared": (
        "granite-moe-shared",
        "granitemoe",
        {},
        {
            **_COUNTS,
            "expert_shared_feed_forward_length": 40,
            "attention__scale": 0.1,
            "embedding_scale": 3.0,
            "residual_scale": 0.3,
            "logit_scale": 4.0,
        },
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
    "minicpm3": (
        "minicpm3",
        "minicpm3",
        {"attention_bias": False, "scale_depth": 1.4, "dim_model_base": 256},
        {
            "attention__kv_lora_rank": 48,
            "attention__q_lora_rank": 32,
            "attention__key_length": 48,
            "attention__value_length": 48,
            "rope__dimension_count": 16,
        },
    ),
    "olmoe": ("olmoe", "olmoe", {}, _COUNTS),
    "phimoe": ("phi-moe", "phimoe", {"router_jitter_noise": 0.01}, {**_COUNTS, "rope__scaling__attn_factor": 1.2}),
    "qwen3next": (
        "qwen3-next-moe",
        "qwen3next",
        {"layer_types": ["linear_attention", "full_attention"]},
        {**_NEXT, "full_attention_interval": 2},
    ),
    "qwen3next-older": ("qwen3-next-moe", "qwen3next", {"layer_types": ["linear_attention"] * 2}, _NEXT),
    "qwen35": (
        "qwen3.5",
        "qwen35",
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_value_head_dim": 32},
        {**_DELTA, "full_attention_interval": 3},
    ),
    "qwen35moe": (
        "qwen3.5-moe",
        "qwen35moe",
        {},
        {
            **_SMALLER,
            **_DELTA,
            "ssm__inner_size": 144,
            "expert_shared_feed_forward_length": 40,
            "attention__recurrent_layers": [True, False],
        },
    ),
    "qwen2vl": ("qwen2", "qwen2vl", {}, {"rope__dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": ("qwen3", "qwen3vl", {}, {"rope__dimension_sections": [6, 5, 5, 0]}),
    "qwen3vlmoe": ("qwen3-moe", "qwen3vlmoe", {}, {**_SMALLER, "rope__dimension_sections": [6, 5, 5, 0]}),
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


@pytest.mark.parametrize(
    ("case", "kind", "dtype"),
    [
        ("granitemoe", Kind.Q8_0, Dtype.INT8),
        ("granitemoe", Kind.Q4_1, Dtype.INT4),
        ("gpt-oss", Kind.MXFP4, Dtype.CODE4),
    ],
)
def test_experts_stay_quantized_in_a_native_program(case: str, kind: Kind, dtype: Dtype, tmp_path: Path) -> None:
    family, arch, changes, metadata = CASES[case]
    theirs = make_checkpoint(family, tmp_path, changes | {"intermediate_size": 64})
    metadata = metadata | ({"expert_feed_forward_length": 64} if "expert_feed_forward_length" in metadata else {})
    files = write_model(tmp_path / "model.gguf", theirs, arch, [kind], **metadata)
    attention = NativeAttention(Pool(2))
    model = NativeDecoder(load_model(files, attention, scheme=BlockQuantized), attention.pool)
    experts = [layer for layer in model.source.modules() if isinstance(layer, ExpertLayer)]
    assert all(layer.packed.dtypes == {dtype} for layer in experts)
    quantized = sum(layer.nbytes for layer in experts)
    assert quantized < 0.3 * sum(one.numel() * 4 for name, one in theirs.state_dict().items() if ".experts." in name)
    rows, block_size = [], 16
    for form in (model, load_model(files, reference_of(files))):
        runner = PagedRunner(form, num_blocks=20, block_size=block_size)
        rows.append(runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True))
    torch.testing.assert_close(*rows, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("case", ["lfm2", "mamba2", "qwen3next", "qwen35", "jamba"])
def test_recurrent_layers_stay_quantized_in_a_native_program(case: str, tmp_path: Path) -> None:
    family, arch, changes, metadata = CASES[case]
    files = write_model(
        tmp_path / "model.gguf", make_checkpoint(family, tmp_path, changes), arch, [Kind.Q8_0], **metadata
    )
    attention, rows = NativeAttention(Pool(2)), []
    native = compiled(load_model(files, attention, scheme=BlockQuantized), attention)
    assert isinstance(native, NativeDecoder)
    assert native.has_integers
    for form in (native, load_model(files, reference_of(files))):
        runner = PagedRunner(form, num_blocks=20, block_size=16)
        rows.append(runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True))
    torch.testing.assert_close(*rows, rtol=5e-3, atol=5e-3)


def logits_of(case: str, folder: Path, kinds: list[Kind] | None) -> tuple[Tensor, Tensor]:
    """Octavo's logits of a file, and those of the model that it was made from."""
    family, arch, changes, metadata = CASES[case]
    theirs = make_checkpoint(family, folder, changes)
    files = write_model(folder / "model.gguf", theirs, arch, kinds, **metadata)
    runner = PagedRunner(load_model(files, reference_of(files)), num_blocks=20, block_size=4)
    logits = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    with torch.no_grad():
        return logits, theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]


def test_every_architecture_is_compared() -> None:
    elsewhere = {"llama", "mistral", "qwen2", "qwen3"} | {"bert"}  # test_gguf_golden.py, test_gguf_encoders.py
    assert {arch for _, arch, _, _ in CASES.values()} | elsewhere == set(FAMILIES)
