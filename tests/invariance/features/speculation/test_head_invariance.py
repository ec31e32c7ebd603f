"""Heads that draft from hidden states change no token, no report and no end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_models import folder_of
from test_draft_model import FEATURES, requests, truth
from toy_drafter import check_same, news_of
from toy_engine import device_of, drive, strict, tiny_config
from toy_models import LLAMA, model_files

from octavo.build import build_core

HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"num_hidden_layers": 1},
    "eagle3": {
        "num_hidden_layers": 1,
        "draft_vocab_size": 60,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["", "depth 2", "chunked prefill", "preemption"])
def test_a_head_changes_nothing(name: str, kind: str, tmp_path: Path) -> None:
    settings = FEATURES[name]
    head = folder_of(LLAMA | HEADS[kind], tmp_path / "head")
    own = {"method": kind, "model": head, "num_speculative_tokens": 3, "adaptive": False}
    loop = build_core(tiny_config(**settings, speculative_config=own), model_files(LLAMA))[0]
    strict(loop)
    check_same(news_of(list(drive(loop, requests()))), truth(device_of(settings)))
    found = {one.name: one.values for one in loop.stats().features}
    assert sum(found["spec_decode_num_draft_tokens"].values()) > 200
    loop.close()
