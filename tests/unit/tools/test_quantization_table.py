from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "quantization_table.py"


def test_the_docs_list_every_format_as_it_is_stored() -> None:
    spec = importlib.util.spec_from_file_location("quantization_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    docs = module.DOCS.read_text(encoding="utf-8")
    assert module.rewrite(docs) == docs, "run PYTHONPATH=.:tests python tools/quantization_table.py"
