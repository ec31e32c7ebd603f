"""A head that drafts where slots are on the device: its steps are recorded, and tokens stay those without drafts.

Without a GPU, graphs are recorded by `toy_graphs` and kernels run in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from draft_models import folder_of
from test_head_invariance import HEADS, lookup_counts
from test_resident_draft_model import requests
from toy_drafter import check_same, news_of
from toy_engine import GPU, drive, strict, tiny_config
from toy_graphs import recorded_graphs
from toy_models import LLAMA, behind, model_files

from octavo.build import build_core
from octavo.engine.loop import EngineLoop


def engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EngineLoop:
    small = {"memory_bytes": 1 << 21, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    return strict(build_core(tiny_config(**small | behind(monkeypatch) | settings), model_files(LLAMA))[0])


@pytest.mark.parametrize(
    ("kind", "lookup"),
    [
        ("eagle3", False),
        ("eagle3", True),
        pytest.param("eagle", False, marks=[pytest.mark.slow] * (not GPU)),
    ],
)
def test_a_head_changes_nothing_on_a_device(
    kind: str, lookup: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loop = engine(monkeypatch, enforce_eager=True, async_scheduling=False)
    asked = requests() if GPU else requests(7)[:2]  # an interpreted step takes a second
    expected = news_of(list(drive(loop, asked)))
    loop.close()
    replayed = recorded_graphs(monkeypatch)
    head = folder_of(LLAMA | HEADS[kind], tmp_path / "head")
    drafts = {"method": kind, "model": head, "num_speculative_tokens": 3, "adaptive": False}
    drafts |= {"prompt_lookup_min": 1} if lookup else {}
    counts = lookup_counts(monkeypatch)
    loop = engine(monkeypatch, speculative_config=drafts)
    check_same(news_of(list(drive(loop, asked))), expected)
    found = {one.name: sum(one.values.values()) for one in loop.stats().features}
    assert found["spec_decode_num_draft_tokens"] > (20 if GPU else 8)
    assert replayed["forward"] > found["spec_decode_num_draft_tokens"] / 4, "the head's steps are recorded"
    assert counts["head"] > 0
    assert bool(counts["lookup"]) == lookup
    loop.close()
