"""Matrices that the methods' own tools quantized, and what those tools make of them: tests/data/quantized/make.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from octavo.models.load.quantized.table import dequantizing
from octavo.models.load.safetensors import SafetensorsCheckpoint
from octavo.nn.weights import TensorSpec

FILES = sorted((Path(__file__).parent.parent / "data" / "quantized").glob("*.safetensors"))


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


def test_there_are_files() -> None:
    assert len(FILES) == 21
