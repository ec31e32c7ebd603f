"""Tiny random checkpoints of architectures that Octavo lacks, made by Transformers, and the same models bridged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import _COMMON, model_files, vary_vectors
from transformers import PreTrainedModel

from octavo.features.bridge.build import Bridge
from octavo.features.bridge.model import BridgedLM
from octavo.hub.files import ModelFiles
from octavo.models.load import open_checkpoint
from octavo.models.load.weights import load_weights
from octavo.nn.attention.base import AttentionBackend
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized

WIDE: dict[str, Any] = {"head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bitnet": ("BitNetConfig", {}),
}
"""Architectures without an implementation of Octavo's own."""
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", {}),
    "arcee": ("ArceeConfig", {}),
    "ministral": ("MinistralConfig", WIDE | {"sliding_window": 7}),
    "vaultgemma": (
        "VaultGemmaConfig",
        WIDE | {"sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "helium": ("HeliumConfig", WIDE),
    "hunyuan": ("HunYuanDenseV1Config", WIDE),
    "youtu": ("YoutuConfig", MLA),
    "dots1": (
        "Dots1Config",
        EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        WIDE | {"sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 20},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", WIDE | EXPERTS),
    "gpt2": ("GPT2Config", {"n_positions": 128}),
    "opt-350m": (
        "OPTConfig",
        {"ffn_dim": 112, "word_embed_proj_dim": 48, "do_layer_norm_before": False, "num_key_value_heads": 4},
    ),
    "olmoe-clipped": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
}


def save(name: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a random checkpoint in the form that its authors publish; return the model in float32."""
    kind, settings = {**OTHERS, **OWN}[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**{**_COMMON, "num_hidden_layers": 3, **settings, **changes})
    config._attn_implementation = "eager"
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    vary_vectors(model)
    model.save_pretrained(folder)
    return model


def bridge_of(files: ModelFiles, *, trusts_code: bool = False) -> Bridge:
    return Bridge(transformers.__version__, files, trusts_code=trusts_code)


def load_bridged(
    folder: Path, attention: AttentionBackend, dtype: torch.dtype = torch.float32, *, trusts_code: bool = False
) -> BridgedLM:
    """Built and filled; every tensor of the checkpoint must have been used."""
    files = model_files(folder)
    bridge = bridge_of(files, trusts_code=trusts_code)
    device = torch.device("cpu")
    build = Build(dtype, device, attention, everywhere(Unquantized, dtype, device))
    model = bridge.build(build, bridge.spec_of(files.config))
    assert isinstance(model, BridgedLM)
    report = load_weights(model, bridge.named(open_checkpoint(files), model.spec))
    assert report.unread == ()
    return model
