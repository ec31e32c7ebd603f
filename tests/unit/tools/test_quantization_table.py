from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "quantization_table.py"


def test_the_docs_list_every_format_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("golden", "oracle"):
        monkeypatch.syspath_prepend(str(ROOT / "tests" / folder))
    spec = importlib.util.spec_from_file_location("quantization_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    docs = module.DOCS.read_text(encoding="utf-8")
    assert module.rewrite(docs) == docs, "run tools/quantization_table.py"
