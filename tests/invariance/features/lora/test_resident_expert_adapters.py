"""Adapters of experts with slots on the device: greedy tokens are those of merged weights.

On a GPU steps are recorded; without one, kernels in Triton are interpreted and those in CUDA C++ compiled for the CPU.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from adapter_kit import kernels_on_any_machine
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, model_files
from tiny_adapters import merged, save_adapter
from tiny_expert_adapters import FORMS, save_and_merge
from toy_engine import drive, tiny_config, tokens_of
from toy_graphs import recorded_graphs
from toy_models import behind

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode

GPU = torch.cuda.is_available()
CASES = {"qwen3-moe": False, "gpt-oss": True}
"""Family -> whether it keeps matrices as [inputs, outputs]."""


def asking(name: str, number: int, *, base: bool) -> GenerateRequest:
    prompt = [(7 * number + 3 * place) % 199 for place in range(5 + 6 * number)]
    params = SamplingParams(max_tokens=24 if GPU else 3, temperature=0, ignore_eos=True)
    return GenerateRequest(id=name, tokens=prompt, params=params, options={} if base else {NAME: encode((Part(name),))})


def tokens(model: Path, asked: list[GenerateRequest], **settings: Any) -> dict[tuple[str, int], list[int]]:
    chosen = {"load_format": "auto", "max_model_len": 64, "max_num_seqs": 4, "num_blocks": 400}
    loop = build_core(tiny_config(**chosen | settings), model_files(model))[0]
    found = tokens_of(drive(loop, asked, at_once=len(asked)))
    loop.close()
    return found


def with_magnitudes(root: Path) -> tuple[Path, Path]:
    """Return an adapter of attention in whose steps all but experts is computed in torch, and the merged model."""
    config, folder = json.loads((root / "base" / "config.json").read_text()), root / "magnitudes-merged"
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = save_adapter(root / "magnitudes", config, seed=7, rank=4, targets=targets, use_dora=True)
    folder.mkdir()
    save_file(merged(load_file(root / "base" / "model.safetensors"), adapter), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return adapter, folder


@pytest.mark.parametrize(
    "family", [one if GPU or not CASES[one] else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_tokens_are_those_of_merged_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make_checkpoint(family, tmp_path / "base")
    made = torch.Generator().manual_seed(1)
    names = {"base": "", "a": "one by one", "b": "stacked"} if not CASES[family] else {"base": "", "b": "stacked"}
    asked, expected, modules = [], {}, []
    for number, (name, form) in enumerate(names.items()):
        own, folder = copy.deepcopy(theirs), tmp_path / "base"
        if form:
            assert form in FORMS
            modules.append(
                f"{name}={save_and_merge(own, tmp_path / name, form, 3 + number, made, transposed=CASES[family])}"
            )
            folder = tmp_path / f"{name}-merged"
            own.save_pretrained(folder)
        asked.append(asking(name, number, base=not form))
        alone = asking(name, number, base=True)
        expected |= tokens(folder, [alone], device="cpu", attention_backend="torch")

    if family == "qwen3-moe":
        adapter, folder = with_magnitudes(tmp_path)
        modules.append(f"magnitudes={adapter}")
        asked.append(asking("magnitudes", 3, base=False))
        alone = asking("magnitudes", 3, base=True)
        expected |= tokens(folder, [alone], device="cpu", attention_backend="torch")
    kernels_on_any_machine(monkeypatch, tmp_path)
    chosen = behind(monkeypatch)
    lora: dict[str, Any] = {"lora_modules": tuple(modules), "max_lora_rank": 8}
    assert tokens(tmp_path / "base", asked, **chosen, **lora, enforce_eager=True) == expected
    if GPU:
        replayed = recorded_graphs(monkeypatch)
        assert tokens(tmp_path / "base", asked, **chosen, **lora) == expected
        assert replayed["sample"] > 1
