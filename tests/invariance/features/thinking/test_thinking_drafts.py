"""Drafts beside a thinking budget change no token: none of them stands where the end mark is forced."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from toy_drafter import DrafterEngine, News, beside_others, check_same, news_of
from toy_engine import drive, one_by_one, strict, tiny_config
from toy_models import LLAMA, model_files
from toy_tokenizers import byte_level

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.thinking.budget import ThinkingBudget
from octavo.hub.files import ModelFiles
from octavo.schedule.request import Request

TOKENIZER = byte_level()
END = TOKENIZER.encode("</think>").ids
SETTINGS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "overlap": {"async_scheduling": True},
    "depth 2, preemption": {"depth": 2, "policy": "priority", "max_num_seqs": 3},
    "torch": {"attention_backend": "torch"},
}


class Drafter(DrafterEngine):
    """Counts the drafts of requests with a budget."""

    def on_verify(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        if "thinking" in request.spec.options:
            super().on_verify(request, num_drafts, num_accepted)


def requests() -> list[GenerateRequest]:
    made = []
    for i in range(12):
        budget = ThinkingBudget(tokens=(0, 3, 9, 14)[i % 4], begin="<think>", end="</think>", open=i % 5 != 4)
        option = {"thinking": msgspec.Raw(msgspec.msgpack.encode(budget))} if i % 6 != 5 else {}
        params = SamplingParams(
            max_tokens=34, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=i % 3 or None
        )
        made.append(
            GenerateRequest(id=f"r{i}", tokens=list(range(10, 15 + 2 * i)), params=params, options=option, priority=-i)
        )
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("tiny")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return model_files(LLAMA | {"vocab_size": TOKENIZER.get_vocab_size()}, folder)


def engine(files: ModelFiles, **settings: Any) -> EngineLoop:
    loop = build_core(tiny_config(device="cpu", **settings), files)[0]
    return strict(loop)


@pytest.fixture(scope="module")
def truth(files: ModelFiles) -> News:
    """Each request alone, without drafts."""
    loop = engine(files, async_scheduling=False)
    found = news_of(list(one_by_one(loop, requests())))
    loop.close()
    return found


def texts(expected: News) -> list[list[int]]:
    prompts = {request.id: request.tokens for request in requests()}
    return [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_beside_a_budget_change_nothing(
    name: str, files: ModelFiles, truth: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter()
    beside_others(monkeypatch, drafter, texts(truth))
    loop = engine(files, **SETTINGS[name])
    check_same(news_of(list(drive(loop, requests()))), truth)
    assert drafter.accepted > 50
    assert drafter.rejected > 20
    if "preemption" in name:
        assert loop.stats().num_preemptions > 0
    loop.close()


def test_the_truth_has_forced_marks(truth: News) -> None:
    """After as many tokens as the budget has."""
    forced = [i for i, request in enumerate(requests()) if request.options and i % 5 != 4]
    for i in forced:
        tokens = truth[f"r{i}", 0][0]
        budget = (0, 3, 9, 14)[i % 4]
        assert tokens[budget : budget + len(END)] == END


def test_a_draft_where_a_mark_is_forced_would_be_noticed(
    files: ModelFiles, truth: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.features.thinking.engine.Watch.drafts_after", lambda self, pending: None)
    beside_others(monkeypatch, Drafter(), texts(truth))
    loop = engine(files)
    with pytest.raises(AssertionError):
        check_same(news_of(list(drive(loop, requests()))), truth)
