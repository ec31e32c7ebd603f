"""Families whose code is not in Transformers, on checkpoints of equal models that are: only names and fields differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRunner
from safetensors.torch import load_file, save_file
from tiny import load_model, make_checkpoint, model_files, reference_of
from tiny_families import HYBRID, HYBRID_MOE, MOE
from torch import Tensor

from octavo.nn.attention.reference import ReferenceAttention

PROMPT = [172, 70, 25, 126, 78, 3, 190, 44]
QWEN = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
}
"""Qwen2 as Qwen 1: each head has keys and values."""


def internlm2(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """4 heads on 2 kv heads, of 16 channels."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    stored = renamed(tensors, names)
    for i in range(3):
        q, k, v = (stored.pop(f"model.layers.{i}.self_attn.{part}_proj.weight") for part in "qkv")
        parts = [q.unflatten(0, (2, 32)), k.unflatten(0, (2, 16)), v.unflatten(0, (2, 16))]
        stored[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(parts, 1).flatten(0, 1).contiguous()
    return stored


def exaone3(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    }
    return renamed(tensors, names)


def qwen1(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "self_attn": "attn",
        "mlp.up_proj": "mlp.w1",
        "mlp.gate_proj": "mlp.w2",
        "mlp.down_proj": "mlp.c_proj",
    }
    stored = renamed(tensors, names)
    for i in range(3):
        for kind in ("weight", "bias"):
            parts = [stored.pop(f"transformer.h.{i}.attn.{part}_proj.{kind}") for part in "qkv"]
            stored[f"transformer.h.{i}.attn.c_attn.{kind}"] = torch.cat(parts)
    return stored


def with_prediction(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With a tensor for multi-token prediction, which the model itself does not read."""
    return {**tensors, "model.mtp_layers.0.input_proj.weight": torch.zeros(2, 4)}


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    def other(name: str) -> str:
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        return name

    return {other(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "architecture", "rename", "fields"),
    [
        ("llama", "InternLM2ForCausalLM", internlm2, {"bias": False}),
        ("llama", "InternLM3ForCausalLM", dict, {"qkv_bias": False, "bias": False}),
        ("llama", "IQuestCoderForCausalLM", dict, {"clip_qkv": None, "use_sliding_window": False}),
        (
            "llama",
            "ExaoneForCausalLM",
            exaone3,
            {"num_layers": 3, "layer_norm_epsilon": 1e-6, "activation_function": "silu", "num_hidden_layers": None},
        ),
        (
            "granite",
            "MiniCPMForCausalLM",
            dict,
            {"scale_emb": 3.0, "scale_depth": 0.3 * 3**0.5, "dim_model_base": 16},
        ),
        ("qwen2", "MiMoForCausalLM", with_prediction, {"num_nextn_predict_layers": 1}),
        (
            "qwen1",
            "QWenLMHeadModel",
            qwen1,
            {"seq_length": 64, "kv_channels": 32, "rotary_emb_base": 500.0, "layer_norm_epsilon": 1e-6, "no_bias": True}
            | {"intermediate_size": 2 * QWEN["intermediate_size"], "rope_parameters": None, "rms_norm_eps": None},
        ),
    ],
)
def test_the_same_logits_under_other_names(
    family: str, architecture: str, rename: Callable[[Any], dict[str, Tensor]], fields: dict[str, Any], tmp_path: Path
) -> None:
    theirs = make_checkpoint("qwen2", tmp_path, QWEN) if family == "qwen1" else make_checkpoint(family, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(rename(load_file(path)), path)
    config = json.loads((tmp_path / "config.json").read_text()) | fields | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = PagedRunner(load_model(model_files(tmp_path), ReferenceAttention()), num_blocks=4, block_size=4)
    logits = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    if family == "granite":  # MiniCPM has no factor of its own for scores
        for layer in theirs.model.layers:
            layer.self_attn.scaling = 0.25
    assert_like(logits, theirs)


def nested(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def nested_inside(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "architecture", "rename", "nesting", "image"),
    [
        ("llama4", "Llama4ForConditionalGeneration", nested, "text_config", "vision_model.class_embedding"),
        ("llama", "LlavaForConditionalGeneration", nested, "text_config", "vision_tower.embeddings"),
        ("llama", "LlavaNextForConditionalGeneration", nested_inside, "text_config", "model.image_newline"),
        ("qwen2", "LlavaOnevisionForConditionalGeneration", nested, "text_config", "image_newline"),
        ("ministral3", "Mistral3ForConditionalGeneration", nested, "text_config", "vision_tower.ln_pre.weight"),
        ("mistral", "Mistral3ForConditionalGeneration", nested, "text_config", "multi_modal_projector.norm.weight"),
        ("gemma3", "Gemma3ForConditionalGeneration", nested, "text_config", "vision_tower.embeddings"),
        ("qwen2", "Qwen2VLForConditionalGeneration", dict, "", "visual.patch_embed.proj.weight"),
        (
            "qwen2",
            "Qwen2_5_VLForConditionalGeneration",
            nested_inside,
            "text_config",
            "model.visual.norm.weight",
        ),
        ("qwen3", "Qwen3VLForConditionalGeneration", nested_inside, "text_config", "model.visual.pos_embed.weight"),
        ("qwen2", "InternVLChatModel", nested, "llm_config", "mlp1.0.weight"),
        ("qwen3", "InternVLForConditionalGeneration", nested_inside, "text_config", "model.vision_tower.norm.weight"),
        ("qwen3-moe", "InternVLForConditionalGeneration", nested_inside, "text_config", "model.vision_tower.norm.bias"),
        ("gpt-oss", "InternVLForConditionalGeneration", nested_inside, "text_config", "model.vision_tower.norm.bias"),
        ("granite", "LlavaNextForConditionalGeneration", nested, "text_config", "image_newline"),
        (
            "deepseek-v3",
            "KimiK25ForConditionalGeneration",
            nested,
            "text_config",
            "vision_tower.patch_embed.proj.weight",
        ),
        ("moonlight", "KimiVLForConditionalGeneration", nested, "text_config", "multi_modal_projector.linear_1.weight"),
    ],
)
def test_the_text_half_of_a_model_with_images(
    family: str,
    architecture: str,
    rename: Callable[[Any], dict[str, Tensor]],
    nesting: str,
    image: str,
    tmp_path: Path,
) -> None:
    theirs = make_checkpoint(family, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(rename(load_file(path)) | {image: torch.ones(3)}, path)
    text = json.loads((tmp_path / "config.json").read_text())
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]} if "VL" in architecture else None
    if "VLFor" in architecture and nesting:
        text["architectures"] = [architecture]
    outer = {nesting: text} if nesting else text | {"model_type": "qwen2_vl"}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"architectures": [architecture]}))
    files = model_files(tmp_path)
    runner = PagedRunner(load_model(files, reference_of(files)), num_blocks=4, block_size=4)
    assert_like(runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True), theirs)


@pytest.mark.parametrize("family", [*MOE, *HYBRID, *HYBRID_MOE])
def test_the_names_of_transformers_own_modules(family: str, tmp_path: Path) -> None:
    """A trainer sends weights under these, and files may have them."""
    theirs = make_checkpoint(family, tmp_path, save_original_format=False)
    files = model_files(tmp_path)
    runner = PagedRunner(load_model(files, reference_of(files)), num_blocks=4, block_size=4)
    assert_like(runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True), theirs)


def assert_like(logits: Tensor, theirs: Any) -> None:
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
