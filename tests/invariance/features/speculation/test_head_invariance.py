"""Heads that draft from hidden states change no token, no report and no end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from draft_models import folder_of
from test_draft_model import FEATURES, requests, truth
from toy_drafter import check_same, news_of
from toy_engine import device_of, drive, strict, tiny_config
from toy_models import LLAMA, model_files

from octavo.build import build_core
from octavo.core.request import GenerateRequest
from octavo.features.speculation.heads.drafter import HeadDrafter
from octavo.features.speculation.lookup_drafters import DeviceDrafter, HostDrafter
from octavo.features.speculation.payload import NAME, SpeculationOption
from octavo.worker.drafts import Drafts

HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"num_hidden_layers": 1},
    "eagle3": {
        "num_hidden_layers": 1,
        "draft_vocab_size": 60,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
}


def lookup_counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many rows got drafts of lookup from now on, and how many of the head."""
    counts = {"lookup": 0, "head": 0}

    def count(kind: type, method: str, name: str) -> None:
        inner = getattr(kind, method)

        def counting(self: Any, *args: Any) -> Drafts | None:
            found: Drafts | None = inner(self, *args)
            counts[name] += 0 if found is None else int((found.counts > 0).sum())
            return found

        monkeypatch.setattr(kind, method, counting)

    count(HostDrafter, "propose", "lookup")
    count(DeviceDrafter, "propose", "lookup")
    count(HeadDrafter, "_propose", "head")
    return counts


def predicting(asked: list[GenerateRequest], tokens: list[int]) -> list[GenerateRequest]:
    """The requests, the second one with a prediction."""
    option = msgspec.Raw(msgspec.msgpack.encode(SpeculationOption(True, len(asked[1].tokens), tokens)))
    asked[1] = msgspec.structs.replace(asked[1], options={NAME: option})
    return asked


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["", "depth 2", "chunked prefill", "preemption"])
@pytest.mark.parametrize("least", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_lookup_before_a_head_changes_nothing(
    least: int, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of text that repeats itself (`least`), and of predictions in either case."""
    settings = FEATURES[name]
    head = folder_of(LLAMA | HEADS[kind], tmp_path / "head")
    own = {"method": kind, "model": head, "num_speculative_tokens": 3, "adaptive": False}
    own["prompt_lookup_min"] = least
    expected = truth(device_of(settings))
    said = expected["r1", 0][0]
    loop = build_core(tiny_config(**settings, speculative_config=own), model_files(LLAMA))[0]
    counts = lookup_counts(monkeypatch)
    check_same(news_of(list(drive(strict(loop), predicting(requests(), said)))), expected)
    assert min(counts.values()) > 3
    found = {one.name: one.values for one in loop.stats().features}
    assert sum(found["spec_decode_num_accepted_tokens"].values()) >= len(said) // 3
    loop.close()


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["", "depth 2", "chunked prefill", "preemption"])
def test_a_head_changes_nothing(name: str, kind: str, tmp_path: Path) -> None:
    settings = FEATURES[name]
    head = folder_of(LLAMA | HEADS[kind], tmp_path / "head")
    own = {"method": kind, "model": head, "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 0}
    loop = build_core(tiny_config(**settings, speculative_config=own), model_files(LLAMA))[0]
    strict(loop)
    check_same(news_of(list(drive(loop, requests()))), truth(device_of(settings)))
    found = {one.name: one.values for one in loop.stats().features}
    assert sum(found["spec_decode_num_draft_tokens"].values()) > 200
    loop.close()
