"""Trees of drafts change how many steps it takes, and nothing else, on every path through them."""

from __future__ import annotations

from typing import Any

import pytest
from rank_kit import CONTEXTS, ranks_in_threads
from test_drafts import FEATURES, SAMPLED, requests, texts, truth
from toy_drafter import check_same, news_of, with_drafter
from toy_engine import device_of, drive, strict, tiny_config
from toy_models import LLAMA, VOCAB, model_files
from toy_tree import TREE, TreeEngine, TreeWorker

from octavo import build, build_worker
from octavo.build import build_core
from octavo.engine.loop import EngineLoop
from octavo.worker.branches import Branches

CASES: dict[str, dict[str, Any]] = {
    **FEATURES,
    "chunked prefill": {"max_num_batched_tokens": 24, "max_num_seqs": 3},
    "torch attention, overlap": FEATURES["torch attention"] | FEATURES["overlap"],
    "torch attention, preemption": FEATURES["torch attention"] | FEATURES["preemption"],
    "preemption, depth 2": FEATURES["preemption"] | FEATURES["depth 2"],
    "chunked prefill, large blocks": {"max_num_batched_tokens": 24, "max_num_seqs": 3, "block_size": 32},
}


def engine(**settings: Any) -> EngineLoop:
    return strict(build_core(tiny_config(**settings), model_files(LLAMA))[0])


@pytest.mark.parametrize("name", CASES)
def test_trees_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CASES[name]
    device = device_of(settings)
    expected = truth(device)
    drafter = TreeEngine()
    with_drafter(monkeypatch, drafter, TreeWorker(texts(device), VOCAB))
    loop = engine(**settings)
    check_same(news_of(list(drive(loop, requests()))), expected)
    whole = [accepted for drafts, accepted in drafter.verified if drafts == len(TREE)]
    assert sum(whole) > 15, "paths of trees are accepted"
    assert any(0 < drafts <= TREE.chain for drafts, _ in drafter.verified), "and chains"
    loop.close()


@pytest.mark.parametrize(
    "division",
    [
        {"tensor_parallel_size": 2},
        pytest.param(CONTEXTS, marks=pytest.mark.slow),
        pytest.param(
            {"tensor_parallel_size": 2, "enable_dbo": True, "attention_backend": "torch"}, marks=pytest.mark.slow
        ),
    ],
    ids=["ranks", "prompts", "micro-batches"],
)
def test_trees_on_several_ranks(division: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a drafter of its own, which proposes the same, and moves its part of keys and values."""
    known, expected = texts("cpu"), truth("cpu")
    ranks_in_threads(monkeypatch, native="attention_backend" not in division)
    settings: dict[str, Any] = {"device": "cpu", "cpu_bind": "nobind", **division}
    drafter = TreeEngine()
    monkeypatch.setattr(build, "build_engine_halves", lambda _: [drafter])
    monkeypatch.setattr(build_worker, "build_worker_halves", lambda _: [TreeWorker(known, VOCAB)])
    loop = engine(**settings)
    check_same(news_of(list(drive(loop, requests()))), expected)
    assert sum(accepted for drafts, accepted in drafter.verified if drafts == len(TREE)) > 15
    loop.close()


def test_trees_over_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"kv_cache_dtype": "int8", "device": "cpu"}
    loop = engine(**settings)
    expected = news_of(list(drive(loop, requests())))
    loop.close()
    prompts = {request.id: request.tokens for request in requests()}
    known = [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]
    drafter = TreeEngine()
    with_drafter(monkeypatch, drafter, TreeWorker(known, VOCAB))
    loop = engine(**settings)
    check_same(news_of(list(drive(loop, requests()))), expected)
    assert sum(accepted for drafts, accepted in drafter.verified if drafts == len(TREE)) > 15
    loop.close()


def test_paths_that_are_not_moved_together_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of({})
    with_drafter(monkeypatch, TreeEngine(), TreeWorker(texts(device), VOCAB))
    monkeypatch.setattr(Branches, "settle", lambda *_: None)
    loop = engine()
    with pytest.raises(AssertionError):
        check_same(news_of(list(drive(loop, requests()))), truth(device))
    loop.close()


def test_requests_that_read_their_output_get_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of({})
    drafter = TreeEngine()
    with_drafter(monkeypatch, drafter, TreeWorker(texts(device), VOCAB))
    loop = engine()
    reading = [i for i, params in enumerate(SAMPLED) if "logprobs" in params]
    asked = [one for i, one in enumerate(requests()) if i % len(SAMPLED) in reading]
    assert asked
    list(drive(loop, asked))
    assert drafter.verified
    assert max(drafts for drafts, _ in drafter.verified) <= TREE.chain
    loop.close()
