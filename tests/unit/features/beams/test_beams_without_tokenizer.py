"""A search over token ids, in an engine without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from toy_models import LLAMA

from octavo.features.beams.api import BeamSearchParams
from octavo.python_api.llm import LLM


def test_sequences_have_tokens_and_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory_bytes": 1 << 20, "threads": 1}
    with LLM(str(tmp_path), skip_tokenizer_init=True, **settings) as llm:
        (beams,) = llm.beam_search([[4, 5]], BeamSearchParams(2, 2))
    assert [(len(one.tokens), one.text) for one in beams.sequences] == [(4, "")] * 2
