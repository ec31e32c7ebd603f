"""Trees of drafts change nothing where the state lives on the device, which alone knows what was accepted.

Without a GPU, graphs are recorded by `toy_graphs` and kernels run in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from toy_drafter import check_same, news_of, runner_of, with_drafter
from toy_engine import GPU, drive, strict, tiny_config
from toy_graphs import recorded_graphs
from toy_models import QWEN3, VOCAB, behind, model_files
from toy_tree import TREE, TreeEngine, TreeWorker

from octavo.build import build_core
from octavo.core.draft_tree import DraftTree
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.worker.resident.warm_up import warm_up

WIDE = DraftTree.of([(0,), (0, 0), (0, 0, 0), (1,), (2,), (3,), (0, 1), (1, 0), (1, 1), (1, 0, 0), (2, 0), (2, 0, 0)])
FEATURES: dict[str, tuple[DraftTree, dict[str, Any]]] = {
    "overlap": (TREE, {}),
    "no overlap": (TREE, {"async_scheduling": False}),
    "depth 2": (TREE, {"depth": 2}),
    "eager": (TREE, {"enforce_eager": True}),
    "many drafts": (WIDE, {}),
}
if GPU:  # the interpreter's FP8 is tested with the kernels
    FEATURES["fp8 cache"] = TREE, {"kv_cache_dtype": "fp8_e4m3"}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "top_k": 20},
    {"temperature": 0, "logprobs": 1},
    {"temperature": 1.0, "seed": 5, "min_tokens": 7},
]


def requests() -> list[GenerateRequest]:
    length = 40 if GPU else 22
    return [
        GenerateRequest(
            id=f"r{i}",
            tokens=list(range(5 + 3 * i, 17 + 5 * i)),
            params=SamplingParams(max_tokens=length, stop_token_ids=[17], **sampled),
        )
        for i, sampled in enumerate(SAMPLED if GPU else SAMPLED[:3])
    ]


def engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EngineLoop:
    small = {"memory_bytes": 1 << 21, "max_num_seqs": 3, "max_num_batched_tokens": 48}
    return strict(build_core(tiny_config(**small | behind(monkeypatch) | settings), model_files(QWEN3))[0])


@pytest.mark.parametrize(
    "name", [name if GPU or name == "overlap" else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]
)
def test_trees_change_nothing_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, settings = FEATURES[name]
    loop = engine(monkeypatch, **settings | {"enforce_eager": True, "async_scheduling": False, "max_num_seqs": 1})
    expected = news_of(list(drive(loop, requests())))
    loop.close()
    replayed = recorded_graphs(monkeypatch)
    prompts = {request.id: request.tokens for request in requests()}
    texts = [prompts[key[0]] + tokens for key, (tokens, *_) in expected.items()]
    drafter = TreeEngine(tree)
    with_drafter(monkeypatch, drafter, TreeWorker(texts, VOCAB, tree))
    loop = engine(monkeypatch, **settings)
    check_same(news_of(list(drive(loop, requests()))), expected)
    accepted = [accepted for drafts, accepted in drafter.verified if drafts == len(tree)]
    assert sum(accepted) > 3, "paths of trees are accepted"
    assert replayed["mixed"] > len(accepted) / 2 or "enforce_eager" in settings, "trees are recorded"
    slots: Any = runner_of(loop).slots
    assert not slots.drafts.unsure.any(), "the host counts as the device does once all is known"
    loop.close()


@pytest.mark.parametrize("room", [20, 26])
def test_before_requests_come_trees_are_whole(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 tokens have no room for two of them."""
    worker = TreeWorker([], VOCAB, WIDE)
    with_drafter(monkeypatch, TreeEngine(WIDE), worker)
    loop = engine(monkeypatch, enforce_eager=True, max_num_batched_tokens=room)
    runner: Any = runner_of(loop)
    before = worker.proposed.copy()
    warm_up(runner, runner.slots, room, len(WIDE))
    assert worker.proposed[len(before) :] == [[len(WIDE) if room > 2 * len(WIDE) else WIDE.chain] * 2]
    loop.close()
