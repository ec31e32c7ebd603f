"""Adapters of experts: the logits are those of the merged weights, for both forms of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import BASE, load
from safetensors.torch import save_file
from tiny import make_checkpoint, model_files, reference_of
from tiny_adapters import PREFIX
from torch import Tensor

from octavo.features.lora.payload import LoraStep

RANK = 3
Delta = dict[str, list[tuple[Tensor, Tensor]]]
"""Parameter -> each expert's A and B, for its matrix [outputs, inputs]."""


def mixtures(theirs: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: one for name, one in theirs.named_modules() if name.endswith("experts") and hasattr(one, "down_proj")}


def draw(module: torch.nn.Module, made: torch.Generator, *, transposed: bool) -> Delta:
    """Draw additions to a module's parameters, and merge them."""
    found: Delta = {}
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).data
        pairs = []
        for matrix in weight:
            outputs, inputs = matrix.shape[::-1] if transposed else matrix.shape
            a = torch.randn(RANK, inputs, generator=made) / inputs**0.5
            b = torch.randn(outputs, RANK, generator=made) * 0.5
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
    for inner, (_, pairs) in zip(("", ".base_layer"), delta.items(), strict=True):
        both = [(b.t(), a.t()) for a, b in pairs] if swapped else pairs
        tensors[f"{path}{inner}.lora_A.weight"] = torch.cat([a for a, _ in both]).contiguous()
        tensors[f"{path}{inner}.lora_B.weight"] = torch.stack([b for _, b in both], dim=2).flatten(1)
    return tensors


FORMS: dict[str, Any] = {
    "one by one": one_by_one,
    "stacked": lambda path, delta: stacked(path, delta, swapped=False),
    "stacked, swapped": lambda path, delta: stacked(path, delta, swapped=True),
}


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3-moe", "one by one"),
        ("qwen3-moe", "stacked"),
        ("qwen3-moe", "stacked, swapped"),
        pytest.param("gpt-oss", "stacked", marks=pytest.mark.slow),
        pytest.param("mixtral", "stacked", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_merged_experts(family: str, form: str, tmp_path: Path) -> None:
    theirs = make_checkpoint(family, tmp_path)
    files = model_files(tmp_path)
    adapted = load(files, reference_of(files), num_blocks=800)
    made = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, 199, (24,), generator=made).tolist()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        plain = theirs(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        for path, module in mixtures(theirs).items():
            delta = draw(module, made, transposed=family == "gpt-oss")
            tensors |= FORMS[form](f"{PREFIX}{path}", delta)
        expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    (tmp_path / "adapter").mkdir()
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [], "bias": "none"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    entered = adapted.enter(tmp_path / "adapter")
    assert entered.general
    rows = [adapted.runner.row(prompt, len(prompt)) for _ in range(2)]
    found = adapted.step(rows, [len(prompt)] * 2, LoraStep(entered.entries, [BASE, 0], general=True))
    torch.testing.assert_close(found, torch.stack([plain, expected]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=1e-2)
