"""LoRA adapters of experts with random weights, in both forms of PEFT's files, merged into a model of Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_adapters import PREFIX
from torch import Tensor

Delta = dict[str, list[tuple[Tensor, Tensor]]]
"""Parameter -> each expert's A and B, for its matrix [outputs, inputs]."""


def mixtures(theirs: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: one for name, one in theirs.named_modules() if name.endswith("experts") and hasattr(one, "down_proj")}


def draw(module: torch.nn.Module, made: torch.Generator, rank: int, *, transposed: bool) -> Delta:
    """Draw additions to a module's parameters, and merge them."""
    found: Delta = {}
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).data
        pairs = []
        for matrix in weight:
            outputs, inputs = matrix.shape[::-1] if transposed else matrix.shape
            a = torch.randn(rank, inputs, generator=made) / inputs**0.5
            b = torch.randn(outputs, rank, generator=made) * 0.5
            matrix += (b @ a).t() if transposed else b @ a
            pairs.append((a, b))
        found[name] = pairs
    return found


def one_by_one(path: str, delta: Delta) -> dict[str, Tensor]:
    """Under the names of each expert's own modules, as Transformers 4 has them."""
    tensors = {}
    for expert in range(len(delta["down_proj"])):
        for name, pairs in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj")):
            a, b = delta[pairs][expert]
            if name != "down_proj":
                b = b.chunk(2)[name == "up_proj"]
            tensors[f"{path}.{expert}.{name}.lora_A.weight"] = a.clone()
            tensors[f"{path}.{expert}.{name}.lora_B.weight"] = b.clone()
    return tensors


def stacked(path: str, delta: Delta, *, swapped: bool) -> dict[str, Tensor]:
    """As PEFT's ParamWrapper keeps them: A [experts * rank, ...], B [..., rank * experts], the first one inside."""
    tensors = {}
    for inner, (_, pairs) in zip((".base_layer", ""), delta.items(), strict=True):
        both = [(b.t(), a.t()) for a, b in pairs] if swapped else pairs
        tensors[f"{path}{inner}.lora_A.weight"] = torch.cat([a for a, _ in both]).contiguous()
        tensors[f"{path}{inner}.lora_B.weight"] = torch.stack([b for _, b in both], dim=2).flatten(1)
    return tensors


FORMS: dict[str, Any] = {
    "one by one": one_by_one,
    "stacked": lambda path, delta: stacked(path, delta, swapped=False),
    "stacked, swapped": lambda path, delta: stacked(path, delta, swapped=True),
}


def save_and_merge(
    theirs: torch.nn.Module, folder: Path, form: str, rank: int, made: torch.Generator, *, transposed: bool = False
) -> Path:
    """Write an adapter of all experts in one of `FORMS`, and merge it into the model.

    Args:
        transposed: the model keeps matrices as [inputs, outputs].
    """
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for path, module in mixtures(theirs).items():
            tensors |= FORMS[form](f"{PREFIX}{path}", draw(module, made, rank, transposed=transposed))
    folder.mkdir()
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
