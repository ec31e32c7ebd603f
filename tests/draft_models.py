"""Folders of drafting models for the models of `toy_models`, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toy_models import LLAMA

NEAR = LLAMA | {"num_hidden_layers": 1}
"""Has the tables and the first layer of LLAMA, so that it is often right."""


def folder_of(config: dict[str, Any], folder: Path) -> str:
    """Return the path of a model without weight files: with the same seed, equal layers get equal weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
