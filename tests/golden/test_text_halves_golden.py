"""Text halves of models with images, on checkpoints that Transformers saved, with its names and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged import PagedRunner
from safetensors.torch import load_file, save_file
from tiny import _COMMON, load_model, model_files, reference_of, vary_vectors
from torch import Tensor

PROMPT = torch.randint(1, 150, (30,), generator=torch.Generator().manual_seed(4)).tolist()
_TEXT = {**_COMMON, "intermediate_size": 48, "num_hidden_layers": 2}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_CLIP = {"model_type": "clip_vision_model", **_VISION}
_PIXTRAL = {"model_type": "pixtral", "head_dim": 16, **_VISION}
_INTERN = {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14}
_TOKENS = {"image_token_id": 198, "video_token_id": 197, "vision_start_token_id": 196, "vision_end_token_id": 195}
_LLAMA4 = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
_AXES = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
_PARTIAL = {**_AXES, "mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_COHERE = {"model_type": "cohere2", "sliding_window": 6, "logit_scale": 1.0}
"""Transformers does not scale logits where there are images; Octavo does, which is a temperature."""
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ("Llava", _CLIP, {"model_type": "llama"}, {}),
    "llava-mistral": ("Llava", _PIXTRAL, {"model_type": "mistral", "sliding_window": None}, {}),
    "llava-next": ("LlavaNext", _CLIP, {"model_type": "mistral", "sliding_window": 6}, {}),
    "llava-onevision": ("LlavaOnevision", _CLIP, {"model_type": "qwen2"}, {}),
    "llava-onevision-tied": ("LlavaOnevision", _CLIP, {"model_type": "qwen2", "tie_word_embeddings": True}, {}),
    "mistral3": ("Mistral3", _PIXTRAL, {"model_type": "mistral", "head_dim": 32}, {"tie_word_embeddings": False}),
    "mistral3-tied": ("Mistral3", _PIXTRAL, {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _YARN}, {}),
    "mistral3-latent": (
        "Mistral3",
        _PIXTRAL,
        {
            "model_type": "mistral4",
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {},
    ),
    "aya": ("AyaVision", _CLIP, {**_COHERE, "sliding_window_pattern": 2}, {}),
    "command-vision": ("Cohere2Vision", _CLIP, {**_COHERE, "head_dim": 16}, {}),
    "exaone4.5": (
        "Exaone4_5_",
        {**_QWEN, "out_hidden_size": 64, "fullatt_block_indexes": [0], "num_key_value_heads": 2},
        {"model_type": "exaone4_5_text", "sliding_window": 6, "sliding_window_pattern": 2},
        {},
    ),
    "glm4v": (
        "Glm4v",
        {**_QWEN, "out_hidden_size": 64, "image_size": 28},
        {"head_dim": 16, "rope_parameters": {**_AXES, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        {},
    ),
    "glm4v-experts": (
        "Glm4vMoe",
        {**_QWEN, "out_hidden_size": 64, "image_size": 28},
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "rope_parameters": {**_AXES, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        },
        {},
    ),
    "lfm2-vl": (
        "Lfm2Vl",
        {"model_type": "siglip2_vision_model", **_VISION, "num_patches": 4},
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {},
    ),
    "qwen2-vl": (
        "Qwen2VL",
        {**_QWEN, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64},
        {"rope_parameters": _AXES},
        _TOKENS,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {**_QWEN, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
        {"rope_parameters": _AXES, **_WINDOWS},
        {**_TOKENS, "tie_word_embeddings": True},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {**_QWEN, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {"head_dim": 16, "rope_parameters": {**_AXES, "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
        {**_TOKENS, "tie_word_embeddings": True},
    ),
    "qwen3.5": (
        "Qwen3_5",
        {**_QWEN, "out_hidden_size": 64, "num_position_embeddings": 16},
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32, "rope_parameters": _PARTIAL, **_DELTA},
        {**_TOKENS, "tie_word_embeddings": True},
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**_QWEN, "out_hidden_size": 64, "num_position_embeddings": 16},
        {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "rope_parameters": _PARTIAL,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            **_EXPERTS,
            **_DELTA,
        },
        _TOKENS,
    ),
    "qwen3-vl-experts": (
        "Qwen3VLMoe",
        {**_QWEN, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "rope_parameters": {**_AXES, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
            **_EXPERTS,
        },
        _TOKENS,
    ),
    "gemma3": (
        "Gemma3",
        {"model_type": "siglip_vision_model", **_VISION},
        {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 14,
        },
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        {},
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {"patch_size": 14, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 64},
        {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        {},
    ),
    "idefics3": ("Idefics3", _VISION, {"model_type": "llama"}, {"pad_token_id": 0}),
    "smolvlm": ("SmolVLM", _VISION, {"model_type": "llama"}, {"pad_token_id": 0, "tie_word_embeddings": True}),
    "internvl": ("InternVL", _INTERN, {"model_type": "qwen2"}, {"tie_word_embeddings": False}),
    "internvl-tied": ("InternVL", _INTERN, {"model_type": "qwen3", "head_dim": 16}, {"tie_word_embeddings": True}),
    "internvl-experts": (
        "InternVL",
        _INTERN,
        {"model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 24, **_EXPERTS},
        {"tie_word_embeddings": False},
    ),
    "internvl-gpt-oss": (
        "InternVL",
        _INTERN,
        {"model_type": "gpt_oss", "head_dim": 16, **_EXPERTS},
        {"tie_word_embeddings": False},
    ),
    "llama4": (
        "Llama4",
        {**_VISION, **_LLAMA4},
        {"head_dim": 16, "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40},
        {},
    ),
}
"""Name -> beginning of the classes' names; fields of the vision model, of the text model, and of the whole."""


def saved(case: str, folder: Path) -> Tensor:
    """Save a whole model; return its logits."""
    name, vision, text, whole = CASES[case]
    make = getattr(transformers, f"{name}Config")
    config = make(vision_config=vision, text_config={**_TEXT, **text}, **whole)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config, dtype=torch.float32).eval()
    vary_vectors(theirs)
    theirs.save_pretrained(folder)
    with torch.no_grad():
        tokens = torch.tensor([PROMPT])
        logits: Tensor = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0]
    return logits


def check(folder: Path, expected: Tensor) -> None:
    files = model_files(folder)
    runner = PagedRunner(load_model(files, reference_of(files)), num_blocks=10, block_size=4)
    logits = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_as_the_whole_model_for_text(case: str, tmp_path: Path) -> None:
    check(tmp_path, saved(case, tmp_path))


def test_experts_that_are_stored_transposed(tmp_path: Path) -> None:
    """As Qwen3-VL's authors publish them."""
    expected, path = saved("qwen3-vl-experts", tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    stacks = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    assert len(stacks) == 4
    save_file(tensors | stacks, path)
    check(tmp_path, expected)
