"""Adapters of bases in other formats: the logits are those of the adapter merged into the values that the base stands
for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import BASE, load
from gguf import GGMLQuantizationType as Kind
from gguf_kit import write_model
from quantized_kit import EXAMPLES
from safetensors.torch import load_file, save_file
from tiny import load_model, make_checkpoint, model_files, reference_of
from tiny_adapters import merged, save_adapter

from octavo.features.lora.payload import LoraStep
from octavo.hub.files import ModelFiles
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.nn.weights import TensorSpec

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95]


def as_gguf(folder: Path, theirs: Any) -> ModelFiles:
    """In Q8_0, as far as rows divide into blocks, and with llama.cpp's order of q and k."""
    files = write_model(folder / "model.gguf", theirs, "llama", [Kind.Q8_0])
    spec = load_model(files, reference_of(files)).spec
    stored = arranged(open_checkpoint(files), spec)
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 2:
            parameter.data.copy_(stored.tensor(name, TensorSpec(tuple(parameter.shape), torch.float32)))
    return files


def as_awq(folder: Path, theirs: Any) -> ModelFiles:
    example, weights = EXAMPLES["awq-gemm"], load_file(folder / "model.safetensors")
    parameters = dict(theirs.named_parameters())
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        stored, exact = example.write(weights.pop(key).float())
        weights |= {f"{key.removesuffix('weight')}{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
        parameters[key].data.copy_(exact)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": example.settings}))
    return model_files(folder)


@pytest.mark.parametrize(("family", "write"), [("llama", as_gguf), ("quantized", as_awq)], ids=["gguf", "awq"])
def test_logits_are_those_of_merged_values(family: str, write: Any, tmp_path: Path) -> None:
    theirs = make_checkpoint(family, tmp_path)
    adapter = save_adapter(tmp_path / "adapter", json.loads((tmp_path / "config.json").read_text()), seed=1, rank=6)
    with torch.no_grad():
        files = write(tmp_path, theirs)
        plain = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
        theirs.load_state_dict(merged(theirs.state_dict(), adapter))
        expected = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    adapted = load(files, reference_of(files))
    entered = adapted.enter(adapter)
    rows = [adapted.runner.row(PROMPT, len(PROMPT)) for _ in range(2)]
    found = adapted.step(rows, [len(PROMPT)] * 2, LoraStep(entered.entries, [BASE, 0]))
    torch.testing.assert_close(found, torch.stack([plain, expected]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=1e-2)
