"""Which decoders generate text, by the names of their architectures."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.build_worker import generates_text
from octavo.config import EngineConfig
from octavo.hub.files import ModelFiles
from octavo.models.registry import ARCHITECTURES


def generates(architecture: str, tmp_path: Path) -> bool:
    config = {"architectures": [architecture]}
    files = ModelFiles(name="model", path=tmp_path, format="safetensors", weights=(), config=config)
    return generates_text(EngineConfig.of(), files)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if not name.endswith("Classification")])
def test_decoders_with_a_head_generate(architecture: str, tmp_path: Path) -> None:
    """GPT2LMHeadModel ends like a bare model."""
    assert generates(architecture, tmp_path)


@pytest.mark.parametrize("architecture", ["GPT2Model", "LlamaModel", "Qwen3ForSequenceClassification"])
def test_bare_models_and_classifiers_make_vectors(architecture: str, tmp_path: Path) -> None:
    assert not generates(architecture, tmp_path)
