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
ROOT = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
"""Modules that are in no layer, and their paths."""

PREFIX = "base_model.model."
_ROWS = "token_adapter.trainable_tokens_delta"


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
        targets: names of projections, of all layers; `embed_tokens` and `lm_head`, too.
        alpha: PEFT's `lora_alpha`; twice the rank by default.
        strength: standard deviation of what the adapter adds to a projection's output, for inputs of unit variance.
        settings: further fields of `adapter_config.json`. `use_dora` adds random magnitudes; `modules_to_save` adds
            random weights of `embed_tokens` or `lm_head`; `trainable_token_indices` adds random rows of these, but none
            of a tied head, as PEFT does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alpha = 2.0 * rank if alpha is None else alpha
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0}
    stated |= {"target_modules": list(targets), "bias": "none", "base_model_name_or_path": "tiny", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(stated, indent=1))
    made = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    inner = [name for name in targets if name not in ROOT]
    for path in [
        *(module_path(layer, name) for layer in range(config["num_hidden_layers"]) for name in inner),
        *(ROOT[name] for name in targets if name in ROOT),
    ]:
        name = path.rpartition(".")[2]
        out_features, in_features = projection_shape(config, name)
        r = stated.get("rank_pattern", {}).get(name, rank)
        spread = strength / scaling_of(stated, name) / math.sqrt(r)
        kind = "lora_embedding_{}" if name == "embed_tokens" else "lora_{}.weight"
        # The columns of an embedding's A are looked up, those of others are multiplied by the whole input.
        root = 1.0 if name == "embed_tokens" else math.sqrt(in_features)
        tensors[f"{PREFIX}{path}.{kind.format('A')}"] = torch.randn(r, in_features, generator=made) / root
        tensors[f"{PREFIX}{path}.{kind.format('B')}"] = torch.randn(out_features, r, generator=made) * spread
        if stated.get("use_dora"):
            tensors[f"{PREFIX}{path}.lora_magnitude_vector"] = torch.rand(out_features, generator=made) + 0.5
    for name in stated.get("modules_to_save") or ():
        shape = (config["vocab_size"], config["hidden_size"])
        tensors[f"{PREFIX}{ROOT[name]}.weight"] = torch.randn(shape, generator=made) * strength
    rows = stated.get("trainable_token_indices") or {}
    for name, ids in (rows if isinstance(rows, dict) else {"embed_tokens": rows}).items():
        if name == "embed_tokens" or not config.get("tie_word_embeddings") or ids != rows.get("embed_tokens"):
            values = torch.randn(len(ids), config["hidden_size"], generator=made) * strength
            tensors[f"{PREFIX}{ROOT[name]}.{_ROWS}"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(
    weights: Mapping[str, Tensor], adapter: Path, weight: float = 1.0, *, tied: bool = False
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with W + weight * scaling * B A in place of each W that the adapter changes.

    With magnitudes m (DoRA, arXiv:2402.09353) that is m * (W + scaling * B A) / norm of each row; saved modules take
    the place of W, and rows of single tokens that of its rows.

    Args:
        tied: rows of the embedding are those of the head, too, unless the adapter has others for it.
    """
    stated = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    changed = dict(weights)
    for key, a in tensors.items():
        if key.endswith(_ROWS):
            _replace_rows(
                changed, stated["trainable_token_indices"], key, a, tied=tied and key.replace(*_HEAD) not in tensors
            )
            continue
        path, _, kind = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if kind in ("lora_A", "lora_embedding_A"):
            b = tensors[key.replace("_A", "_B")]
            base = changed[f"{path}.weight"]
            delta = weight * scaling_of(stated, path.rpartition(".")[2]) * (b.double() @ a.double())
            found = base.double() + (delta.t() if kind == "lora_embedding_A" else delta)
            if (m := tensors.get(f"{PREFIX}{path}.lora_magnitude_vector")) is not None:
                found *= (m.double() / found.norm(dim=1))[:, None]
            changed[f"{path}.weight"] = found.to(base.dtype)
        elif not kind.startswith("lora"):
            changed[key.removeprefix(PREFIX)] = a
    return changed


_HEAD = (ROOT["embed_tokens"], ROOT["lm_head"])


def _replace_rows(changed: dict[str, Tensor], indices: Any, key: str, rows: Tensor, *, tied: bool) -> None:
    path = key.removeprefix(PREFIX).removesuffix(f".{_ROWS}")
    ids = indices if isinstance(indices, list) else indices[path.rpartition(".")[2]]
    for name in (path, ROOT["lm_head"]) if tied else (path,):
        changed[f"{name}.weight"] = changed[f"{name}.weight"].index_copy(0, torch.tensor(ids), rows)


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
        "embed_tokens": (hidden, config["vocab_size"]),
        "lm_head": (config["vocab_size"], hidden),
    }[name]
