"""How much memory packed weights need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_models import LLAMA, Behind

from octavo.config import ModelConfig
from octavo.device.cpu import CpuDevice
from octavo.hub.files import ModelFiles
from octavo.worker.schemes import needed_bytes

EIGHT, FOUR = {"num_bits": 8}, {"num_bits": 4}


def files(tmp_path: Path, method: str | None, **further: Any) -> ModelFiles:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    config = LLAMA | ({"quantization_config": {"quant_method": method}} if method else {}) | further
    return ModelFiles(name="tiny", path=tmp_path, format="safetensors", weights=(path,), config=config)


@pytest.mark.parametrize(
    ("method", "settings", "needed"),
    [
        ("awq", {}, 200),
        ("awq", {"dtype": "float16"}, 400),
        ("fp8", {}, 106),
        ("fp8", {"dtype": "bfloat16"}, 400),
        ("modelopt", {}, 400),
        (None, {}, 400),
    ],
)
def test_a_packed_model_fits_where_an_expanded_one_would_not(
    method: str | None, settings: dict[str, Any], needed: int, tmp_path: Path
) -> None:
    given = files(tmp_path, method)
    assert given.weight_bytes == 100
    assert needed_bytes(400, ModelConfig(**settings), given, Behind()) == needed
    assert needed_bytes(400, ModelConfig(**settings), given, CpuDevice()) == 400


@pytest.mark.parametrize(("weights", "needed"), [(EIGHT, 106), (FOUR, 400)])
def test_weights_of_8_bits_keep_their_bytes(weights: dict[str, int], needed: int, tmp_path: Path) -> None:
    groups = {"all": {"weights": weights, "input_activations": EIGHT}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    given = files(tmp_path, None, quantization_config=settings)
    assert needed_bytes(400, ModelConfig(), given, Behind()) == needed


def test_experts_are_expanded(tmp_path: Path) -> None:
    assert needed_bytes(400, ModelConfig(), files(tmp_path, "fp8", num_experts=4), Behind()) == 400
