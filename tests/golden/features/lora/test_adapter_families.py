"""Adapters of every linear layer of Transformers' own model, under its names, for all families: the logits are those of
the merged weights. Fused layers (qkv_proj, query_key_value, c_attn, gate_up_proj) have one pair of matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import kernels_on_any_machine, load
from safetensors.torch import save_file
from tiny import FAMILIES, make_checkpoint, model_files, reference_of
from tiny_adapters import PREFIX
from tiny_families import DENSE, HYBRID, MOE
from torch import Tensor
from toy_engine import GPU, drive, tiny_config, tokens_of
from toy_models import behind
from transformers.pytorch_utils import Conv1D

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.lora.payload import NAME, LoraStep
from octavo.features.lora.requests import Part, encode

STRENGTH = 0.3
_FAST = ("falcon", "glm", "gpt-neox", "gpt2", "phi3")
"""Families whose checkpoints fuse projections, each in its own way."""
_OTHERS = ("x_proj", "dt_proj", "router", "kv_b_proj")
"""Layers whose weights only a kernel reads in some families, and a router with several outputs, so that PEFT can't
change them; and what latent attention absorbs, which Octavo's adapters can't."""


_WHOLE_PANELS = {"qwen3-next": {"linear_num_value_heads": 16}}
"""Each of several projections in one has a multiple of 16 outputs, as the CPU's kernels need for adapters."""


def linears(theirs: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found = {}
    for name, module in theirs.named_modules():
        head = module is theirs.get_output_embeddings()
        if isinstance(module, torch.nn.Linear | Conv1D) and not head and not name.endswith(_OTHERS):
            found[name] = module
    return found


def adapt(theirs: torch.nn.Module, folder: Path, *, rank: int, seed: int, **settings: Any) -> Path:
    """Write an adapter of all linear layers, and merge it into the model."""
    folder.mkdir()
    made = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in linears(theirs).items():
        weight = module.weight.data.T if isinstance(module, Conv1D) else module.weight.data
        a = torch.randn(rank, weight.shape[1], generator=made) / weight.shape[1] ** 0.5
        b = torch.randn(weight.shape[0], rank, generator=made) * STRENGTH / rank**0.5
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
        found = weight + b @ a
        if settings.get("use_dora"):
            gain = torch.rand(weight.shape[0], generator=made) + 0.5
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = gain
            found *= (gain / found.norm(dim=1))[:, None]
        weight.copy_(found)
    targets = sorted({name.rpartition(".")[2] for name in linears(theirs)})
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(stated | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("use_dora", [False, True], ids=["additions", "magnitudes"])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in _FAST else pytest.mark.slow)
        for name in sorted({**FAMILIES, **DENSE, **MOE})
    ],
)
def test_logits_are_those_of_merged_weights(family: str, use_dora: bool, tmp_path: Path) -> None:
    theirs = make_checkpoint(family, tmp_path)
    files = model_files(tmp_path)
    adapted = load(files, reference_of(files))
    with torch.no_grad():
        adapter = adapt(theirs, tmp_path / "adapter", rank=6, seed=1, use_dora=use_dora)
        prompt = torch.randint(1, 199, (40,), generator=torch.Generator().manual_seed(3)).tolist()
        expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0]
    payload = adapted.enter(adapter)
    row = adapted.runner.row(prompt, len(prompt))
    step = LoraStep(payload.entries, [0], payload.general)
    found = adapted.step([row], [len(prompt)], step, all_logits=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in ("nemotron-h", "qwen3-next") else pytest.mark.slow)
        for name in sorted(HYBRID)
    ],
)
def test_recurrent_layers_give_the_tokens_of_merged_weights(family: str, tmp_path: Path) -> None:
    """In an engine, with a row of the base model beside."""
    theirs = make_checkpoint(family, tmp_path, _WHOLE_PANELS.get(family))
    prompt = torch.randint(1, 199, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = [greedy(theirs, prompt)]
    with torch.no_grad():
        adapter = adapt(theirs, tmp_path / "adapter", rank=6, seed=1)
    expected.append(greedy(theirs, prompt))
    settings = {"dtype": "float32", "memory_bytes": 1 << 23, "max_num_batched_tokens": 16}
    config = tiny_config(**settings, load_format="auto", lora_modules=(f"a={adapter}",))
    loop, _ = build_core(config, model_files(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {NAME: encode((Part("a"),))}
    asked = [
        GenerateRequest(id="base", tokens=prompt, params=params),
        GenerateRequest(id="adapted", tokens=prompt, params=params, options=options),
    ]
    found = tokens_of(drive(loop, asked))
    loop.close()
    assert [found["base", 0], found["adapted", 0]] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("recorded", [pytest.param(GPU, marks=[pytest.mark.slow] * (not GPU))])
def test_six_projections_of_one_product_on_a_device(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels add to them: nothing is left to torch, so a GPU records such steps."""
    pytest.importorskip("triton")
    theirs = make_checkpoint("qwen3-next", tmp_path, {"linear_num_value_heads": 8, "vocab_size": 200})
    prompt = torch.randint(1, 199, (9,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = [greedy(theirs, prompt, 3)]
    with torch.no_grad():
        adapter = adapt(theirs, tmp_path / "adapter", rank=6, seed=1)
    expected.append(greedy(theirs, prompt, 3))
    kernels_on_any_machine(monkeypatch, tmp_path)
    settings: dict[str, Any] = {
        "memory_bytes": 1 << 25,
        "num_blocks": 100,
        "max_num_seqs": 2,
        "max_model_len": 32,
        "max_lora_rank": 8,
    }
    settings |= {"load_format": "auto", "lora_modules": (f"a={adapter}",), "enforce_eager": not recorded}
    with caplog.at_level("INFO"):
        loop, _ = build_core(tiny_config(**settings, **behind(monkeypatch)), model_files(tmp_path))
    assert "computed in torch" not in caplog.text
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    asked = [
        GenerateRequest(id="base", tokens=prompt, params=params),
        GenerateRequest(id="adapted", tokens=prompt, params=params, options={NAME: encode((Part("a"),))}),
    ]
    found = tokens_of(drive(loop, asked, at_once=2))
    loop.close()
    assert [found["base", 0], found["adapted", 0]] == expected
    assert expected[0] != expected[1]


def greedy(theirs: torch.nn.Module, prompt: list[int], count: int = 6) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
