"""Matrices and whole checkpoints that the methods' own tools quantized, and what those tools make of them:
tests/data/quantized/make.py and make_models.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from paged import PagedRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import load_model, model_files

from octavo.models.load.quantized.table import dequantizing
from octavo.models.load.safetensors import SafetensorsCheckpoint
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.weights import TensorSpec

FOLDER = Path(__file__).parent.parent / "data" / "quantized"
FILES, MODELS = sorted(FOLDER.glob("*.safetensors")), sorted((FOLDER / "models").glob("*.safetensors"))
PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9, 32, 38, 46, 26, 43, 38]
LIMITS = {"llmcompressor-w8a8": 0.05, "llmcompressor-fp8": 0.1, "bitsandbytes-8": 0.05}
"""Largest differences of logits, as a part of their norm, where tools round activations to 8 bits. Others compute in
bfloat16 or float16."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_matrix_is_the_tools(path: Path) -> None:
    with safe_open(path, "pt") as file:
        settings, expected = json.loads(file.metadata()["quantization_config"]), file.get_tensor("expected")
    view = dequantizing(SafetensorsCheckpoint([path]), {"quantization_config": settings})
    assert view.names() == {"proj.weight", "expected"}
    assert view.shape("proj.weight") == expected.shape
    values = view.tensor("proj.weight", TensorSpec(tuple(expected.shape), torch.float32))
    # Tools that compute in float16 round each value, and compressed-tensors computes NVFP4 in bfloat16.
    limit = 4e-3 if path.stem == "nvfp4" else 1e-3
    torch.testing.assert_close(values, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_logits_are_the_tools(path: Path, tmp_path: Path) -> None:
    with safe_open(path, "pt") as file:
        (tmp_path / "config.json").write_text(file.metadata()["config"])
    tensors = load_file(path)
    expected = tensors.pop("expected")
    save_file(tensors, tmp_path / "model.safetensors")
    runner = PagedRunner(load_model(model_files(tmp_path), ReferenceAttention()), num_blocks=4, block_size=16)
    logits = runner.step([runner.row(PROMPT, len(PROMPT))], [len(PROMPT)], all_logits=True)
    assert float((logits - expected).norm() / expected.norm()) < LIMITS.get(path.stem, 0.02)


def test_there_are_files() -> None:
    assert len(FILES) == 21
    assert len(MODELS) == 23
