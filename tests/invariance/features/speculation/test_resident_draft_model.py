"""A model that drafts where slots are on the device: its steps are recorded, and the host never waits for lengths.

Without a GPU, graphs are recorded by `toy_graphs` and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from draft_models import folder_of
from toy_drafter import check_same, news_of
from toy_engine import GPU, drive, strict, tiny_config
from toy_graphs import recorded_graphs
from toy_models import QWEN3, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "top_k": 20, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 7},
    {"temperature": 1.0, "seed": 5, "n": 2},
]
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a twin": ({}, {}),
    "depth 2, chunked prefill": ({"depth": 2, "max_num_batched_tokens": 12}, {}),
    "preemption": ({"policy": "priority", "max_num_seqs": 2}, {}),
    "another model": ({}, {"num_attention_heads": 4, "head_dim": 32, "hidden_size": 32}),
}


def requests(length: int = 12) -> list[GenerateRequest]:
    rng = random.Random(6)
    made = []
    for i, sampled in enumerate(SAMPLED):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(max_tokens=length, ignore_eos=True, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=-i))
    return made


def engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EngineLoop:
    small = {"memory_bytes": 1 << 21, "max_num_seqs": 3, "max_num_batched_tokens": 48}
    loop = build_core(tiny_config(**small | behind(monkeypatch) | settings), model_files(QWEN3))[0]
    return strict(loop)


@pytest.mark.parametrize("name", [name if GPU else pytest.param(name, marks=pytest.mark.slow) for name in WAYS])
def test_a_model_that_drafts_changes_nothing_on_a_device(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings, differs = WAYS[name]
    loop = engine(monkeypatch, enforce_eager=True, async_scheduling=False)
    expected = news_of(list(drive(loop, requests())))
    loop.close()
    replayed = recorded_graphs(monkeypatch)
    model = folder_of(QWEN3 | differs, tmp_path / "drafting")
    own = {"method": "draft_model", "model": model, "num_speculative_tokens": 3, "adaptive": False}
    loop = engine(monkeypatch, speculative_config=own, **settings)
    check_same(news_of(list(drive(loop, requests()))), expected)
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    drafts, accepted = counts["spec_decode_num_draft_tokens"], counts["spec_decode_num_accepted_tokens"]
    assert drafts > 20
    if not differs:
        assert accepted == drafts, "a twin is right unless its cache lacks something"
    assert replayed["forward"] > drafts / 4, "the drafting model's steps are recorded"
    loop.close()
