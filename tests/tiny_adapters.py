"""LoRA adapters with random weights, in folders as PEFT saves them, and the base model's weights with one merged in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EVERY = ATTENTION + MLP

PREFIX = "base_model.model."


def save_adapter(
    folder: Path,
    config: Mapping[str, Any],
    *,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = EVERY,
    alpha: float | None = None,
    strength: float = 0.3,
    **settings: Any,
) -> Path:
    """Write `adapter_config.json` and `adapter_model.safetensors`, and return the folder.

    Args:
        config: the base model's configuration (config.json).
        rank: of each projection, unless `rank_pattern` is among the settings (keys: names of projections).
        targets: names of projections; of all layers.
        alpha: PEFT's `lora_alpha`; twice the rank by default.
        strength: standard deviation of what the adapter adds to a projection's output, for inputs of unit variance.
        settings: further fields of `adapter_config.json`. `use_dora` adds random magnitudes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alpha = 2.0 * rank if alpha is None else alpha
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0}
    stated |= {"target_modules": list(targets), "bias": "none", "base_model_name_or_path": "tiny", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(stated, indent=1))
    made = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name in targets:
            path = f"{PREFIX}{module_path(layer, name)}"
            out_features, in_features = projection_shape(config, name)
            r = stated.get("rank_pattern", {}).get(name, rank)
            spread = strength / scaling_of(stated, name) / math.sqrt(r)
            tensors[f"{path}.lora_A.weight"] = torch.randn(r, in_features, generator=made) / math.sqrt(in_features)
            tensors[f"{path}.lora_B.weight"] = torch.randn(out_features, r, generator=made) * spread
            if stated.get("use_dora"):
                tensors[f"{path}.lora_magnitude_vector"] = torch.rand(out_features, generator=made) + 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(weights: Mapping[str, Tensor], adapter: Path, weight: float = 1.0) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with W + weight * scaling * B A in place of each W that the adapter changes."""
    stated = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    changed = dict(weights)
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        path = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        b = tensors[key.replace("lora_A", "lora_B")]
        base = changed[f"{path}.weight"]
        delta = weight * scaling_of(stated, path.rpartition(".")[2]) * (b.double() @ a.double())
        changed[f"{path}.weight"] = (base.double() + delta).to(base.dtype)
    return changed


def scaling_of(stated: Mapping[str, Any], name: str) -> float:
    """Return alpha / r, or alpha / sqrt(r) of rank-stabilised LoRA (arXiv:2312.03732), for projections of this name."""
    r = stated.get("rank_pattern", {}).get(name, stated["r"])
    alpha = float(stated.get("alpha_pattern", {}).get(name, stated["lora_alpha"]))
    return alpha / math.sqrt(r) if stated.get("use_rslora") else alpha / r


def module_path(layer: int, name: str) -> str:
    """Return a projection's path in the base model, as in its checkpoint."""
    return f"model.layers.{layer}.{'self_attn' if name in ATTENTION else 'mlp'}.{name}"


def projection_shape(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return (out_features, in_features) of a projection."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads") or heads
    return {
        "q_proj": (heads * width, hidden),
        "k_proj": (keys * width, hidden),
        "v_proj": (keys * width, hidden),
        "o_proj": (hidden, heads * width),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }[name]
