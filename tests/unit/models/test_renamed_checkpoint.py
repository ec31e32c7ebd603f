"""Checkpoints under other names."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.dummy import DummyCheckpoint
from octavo.models.load.renamed import with_modern_norms, with_root
from octavo.models.load.safetensors import SafetensorsCheckpoint
from octavo.nn.weights import TensorSpec


def stored(folder: Path, *names: str) -> Checkpoint:
    path = folder / "model.safetensors"
    safetensors.torch.save_file({name: torch.full((2, 3), float(i)) for i, name in enumerate(names)}, path)
    return SafetensorsCheckpoint([path])


def value(checkpoint: Checkpoint, name: str) -> float:
    assert checkpoint.has(name)
    assert checkpoint.shape(name) == (2, 3)
    assert checkpoint.blocks(name) is None
    return checkpoint.tensor(name, TensorSpec((2, 3), torch.float32))[0, 0].item()


def test_a_root_is_put_before_the_names_of_a_bare_model(tmp_path: Path) -> None:
    found = with_root(stored(tmp_path, "norm.weight", "lm_head.weight"), "model")
    assert found.names() == {"model.norm.weight", "lm_head.weight"}
    assert value(found, "model.norm.weight") == 0
    assert value(found, "lm_head.weight") == 1
    assert not found.has("norm.weight")
    assert found.origin.endswith("model.safetensors")


@pytest.mark.parametrize("names", [("model.norm.weight", "lm_head.weight"), ("model.layers.0.x",)])
def test_a_root_that_is_there_stays(tmp_path: Path, names: tuple[str, ...]) -> None:
    source = stored(tmp_path, *names)
    assert with_root(source, "model") is source


def test_made_up_weights_have_any_name() -> None:
    source = DummyCheckpoint(0)
    assert with_root(source, "model") is source
    assert with_modern_norms(source) is source


def test_norms_of_the_oldest_checkpoints(tmp_path: Path) -> None:
    found = with_modern_norms(stored(tmp_path, "a.LayerNorm.gamma", "a.LayerNorm.beta", "a.dense.weight", "single"))
    assert found.names() == {"a.LayerNorm.weight", "a.LayerNorm.bias", "a.dense.weight", "single"}
    assert value(found, "a.LayerNorm.bias") == 1
    assert value(found, "a.dense.weight") == 2
