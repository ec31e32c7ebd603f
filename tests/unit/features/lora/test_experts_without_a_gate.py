"""Pairs for all experts whose shapes do not tell which of their two tensors each belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.features.lora.adapter_file import STACKED, STRAIGHT, SWAPPED
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.layout import StackedPart, Target, TargetPart

PATH = "model.layers.0.mlp.experts"
SIZES = {"up_proj": (32, 48), "down_proj": (48, 32)}
EXPERTS, RANK = 2, 3
TARGETS = tuple(
    Target(
        f"{PATH}.{expert}", (TargetPart(name, i, o, i, o, stack=StackedPart(f"{PATH}.{name}", 0, 0, 0)),), expert=expert
    )
    for expert in range(EXPERTS)
    for name, (i, o) in SIZES.items()
)


def save(folder: Path, names: list[str], *, swapped: bool) -> Path:
    """Write an adapter of these tensors as PEFT does: the first one's pair is inside the last one's."""
    tensors = {}
    for i, name in enumerate(sorted(names, reverse=True)):
        inputs, outputs = SIZES[name][::-1] if swapped else SIZES[name]
        at = f"base_model.model.{PATH}{'.base_layer' * (len(names) - 1 - i)}"
        tensors[f"{at}.lora_A.weight"] = torch.zeros(EXPERTS * RANK, inputs)
        tensors[f"{at}.lora_B.weight"] = torch.zeros(outputs, EXPERTS * RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_parameters": [f"experts.{one}" for one in names],
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("names", [["up_proj"], ["down_proj"], ["down_proj", "up_proj"]])
def test_pairs_belong_to_the_tensors_that_the_configuration_names(
    names: list[str], swapped: bool, tmp_path: Path
) -> None:
    file = read_adapter(save(tmp_path, names, swapped=swapped), TARGETS, 64)
    found = [TARGETS[piece.target].parts[0].name for piece in file.manifest.pieces]
    assert found == [name for name in SIZES if name in names] * EXPERTS
    assert {roles[STACKED] for roles in file.tensors} == {SWAPPED if swapped else STRAIGHT}
