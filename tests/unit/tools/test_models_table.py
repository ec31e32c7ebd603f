from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from octavo.models.registry import NESTED

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "models_table.py"


@pytest.mark.features("bridge")
def test_the_docs_list_every_architecture_as_it_is() -> None:
    spec = importlib.util.spec_from_file_location("models_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    docs = module.DOCS.read_text(encoding="utf-8")
    assert module.rewrite(docs) == docs, "run python tools/models_table.py"


def test_the_docs_list_every_model_with_images_or_audio() -> None:
    docs = (SCRIPT.parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in NESTED if f"`{name}`" not in docs] == []
