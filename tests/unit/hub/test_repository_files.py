"""Which files of a Hugging Face repository are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from octavo.hub import repository

WANTED = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "1_Pooling/config.json",
    "2_Dense/model.safetensors",
}
OTHERS = {
    "README.md",
    "consolidated.safetensors",
    "onnx/config.json",
    "original/model.safetensors",
    "tokenizer_old/tokenizer.json",
    "pytorch_model.bin",
}


@pytest.mark.parametrize("weights", [True, False])
def test_files_that_are_downloaded(weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def download(model: str, **settings: Any) -> str:
        patterns = {name: settings[name] for name in ("allow_patterns", "ignore_patterns")}
        found.update(filter_repo_objects(sorted(WANTED | OTHERS), **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(repository, "_look_up", lambda model, revision: None)
    repository.fetch_repository("owner/name", revision=None, weights=weights, unknown="")
    large = {name for name in WANTED if "safetensors" in name}
    assert found == (WANTED if weights else WANTED - large)
