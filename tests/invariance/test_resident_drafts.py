"""Drafts change nothing where the state lives on the device, which alone knows for a while how many were accepted.

Without a GPU, graphs are recorded by `toy_graphs` and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("triton")

from toy_drafter import DrafterEngine, DrafterWorker, check_same, news_of, runner_of, with_drafter
from toy_engine import drive, strict, tiny_config
from toy_graphs import recorded_graphs
from toy_models import QWEN3, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.worker.resident.warm_up import warm_up

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 1.5}, "min_tokens": 7},
    {"temperature": 0.9, "seed": 3, "top_k": 20, "logprobs": 2},
    {"temperature": 0, "bad_token_ids": [[11], [40, 41]], "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 5},
]
FEATURES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"async_scheduling": False},
    "depth 2, chunked prefill": {"depth": 2, "max_num_batched_tokens": 12},
    "preemption": {"policy": "priority", "max_num_seqs": 2},
}


def requests() -> list[GenerateRequest]:
    rng = random.Random(6)
    made = []
    for i, sampled in enumerate(SAMPLED):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(3, 20))]
        stops = [rng.randrange(VOCAB) for _ in range(3)]
        params = SamplingParams(max_tokens=9, stop_token_ids=stops, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=-i))
    return made


def engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EngineLoop:
    small = {"memory_bytes": 1 << 21, "max_num_seqs": 3, "max_num_batched_tokens": 48}
    loop = build_core(tiny_config(**small | behind(monkeypatch) | settings), model_files(QWEN3))[0]
    return strict(loop)


_truth: dict[str, Any] = {}


def truth(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Without drafts, one at a time, and nothing recorded."""
    if not _truth:
        loop = engine(monkeypatch, enforce_eager=True, async_scheduling=False, max_num_seqs=1)
        _truth.update(news_of(list(drive(loop, requests()))))
        loop.close()
    return _truth


def test_drafts_beside_windows_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of layers with windows, whose blocks are released while drafts are in flight."""
    windows = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    files, small = model_files(QWEN3 | windows), {"memory_bytes": 1 << 21, "max_num_seqs": 2}
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=f"r{i}", tokens=list(range(5 + i, 30 + i)), params=params) for i in range(2)]
    loop, _ = build_core(tiny_config(device="cpu", attention_backend="torch", **small), files)
    expected = news_of(list(drive(loop, asked)))
    loop.close()
    texts = [request.tokens + expected[request.id, 0][0] for request in asked]
    drafter = DrafterEngine(3)
    with_drafter(monkeypatch, drafter, DrafterWorker(texts, VOCAB))
    loop, info = build_core(tiny_config(**small | behind(monkeypatch)), files)
    assert info.kv_groups == 2
    check_same(news_of(list(drive(loop, asked))), expected)
    assert min(drafter.accepted, drafter.rejected) > 0
    loop.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_drafts_change_nothing_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = truth(monkeypatch)
    replayed = recorded_graphs(monkeypatch)
    prompts = {request.id: request.tokens for request in requests()}
    texts = [prompts[key[0]] + tokens for key, (tokens, *_) in expected.items()]
    drafter = DrafterEngine(3)
    with_drafter(monkeypatch, drafter, DrafterWorker(texts, VOCAB))
    loop = engine(monkeypatch, **FEATURES[name])
    found = news_of(list(drive(loop, requests())))
    check_same(found, expected)
    assert drafter.accepted > 3
    assert drafter.rejected > 3
    assert replayed["mixed"] or name == "depth 2, chunked prefill", "prompts are still recorded"
    slots: Any = runner_of(loop).slots
    assert not slots.drafts.unsure.any(), "the host counts as the device does once all is known"
    loop.close()


def test_nothing_is_allocated_for_drafts_unless_a_feature_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = engine(monkeypatch, enforce_eager=True)
    runner: Any = runner_of(loop)
    assert runner.slots.drafts is None
    assert runner._sampler._drafted is None
    loop.close()


def test_a_warm_up_proposes_and_verifies_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first steps with drafts load no kernels."""
    worker = DrafterWorker((), VOCAB)
    with_drafter(monkeypatch, DrafterEngine(3), worker)
    loop = engine(monkeypatch, enforce_eager=True, max_num_seqs=2)
    runner: Any = runner_of(loop)
    verified: list[list[int]] = []
    accept = runner.slots.drafts.accept

    def noting(plan: Any, drawn: Any) -> Any:
        verified.append(plan.num_drafts)
        return accept(plan, drawn)

    monkeypatch.setattr(runner.slots.drafts, "accept", noting)
    asked = worker.asked
    warm_up(runner, runner.slots, 12, 3)
    assert worker.asked == asked + 1
    assert verified == [[3, 3]]
    assert not runner.slots.drafts.unsure.any()
    loop.close()
