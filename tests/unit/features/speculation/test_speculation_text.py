"""Fields of requests, and counts of drafts in answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from server_kit import TOKENIZER, ask_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.output import CompletionOutput, RequestOutput, VerifiedDrafts
from octavo.core.params import SamplingParams
from octavo.engine.fake import fake_info
from octavo.features.speculation.payload import NAME, DraftCounts, DraftInfo, SpeculationOption
from octavo.features.speculation.text import SpeculationText
from octavo.server.openai.generation import UsageCounter

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PARTS = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]


def text_half(*, present: bool = True, drafts: DraftInfo | None = None, **changes: Any) -> SpeculationText:
    told = {} if drafts is None else {NAME: msgspec.Raw(msgspec.msgpack.encode(drafts))}
    info = fake_info(features=[NAME] if present else [], feature_info=told, **changes)
    return SpeculationText(SimpleNamespace(tokenizer=TOKENIZER, info=info))  # type: ignore[arg-type]


def option(params: SamplingParams, half: SpeculationText) -> SpeculationOption:
    raw = half.option(params, None, [5, 6, 7])
    assert raw is not None
    return msgspec.msgpack.decode(raw, type=SpeculationOption)


@pytest.mark.parametrize("content", ["abc", PARTS])
def test_a_prediction_is_tokenized(content: Any) -> None:
    half = text_half()
    body = SimpleNamespace(prediction={"type": "content", "content": content})
    params = SamplingParams(**half.params_of(body, max_bytes=10))
    assert option(params, half) == SpeculationOption(True, 3, TOKENIZER.encode("abc", add_special_tokens=False))
    with pytest.raises(InvalidRequestError, match="at most 2 bytes"):
        half.params_of(body, max_bytes=2)


def test_a_prediction_ends_before_a_token_that_the_model_lacks() -> None:
    tokens = TOKENIZER.encode("abc", add_special_tokens=False)
    body = SimpleNamespace(prediction={"type": "content", "content": "abc"})
    for size in (tokens[0], max(tokens), max(tokens) + 1):
        half = text_half(vocab_size=size)
        found = option(SamplingParams(**half.params_of(body, max_bytes=10)), half).prediction
        assert found == tokens[: next((i for i, token in enumerate(tokens) if token >= size), len(tokens))]


def test_speculative_turns_drafts_off() -> None:
    half = text_half()
    for value in (True, False):
        params = SamplingParams(**half.params_of(SimpleNamespace(speculative=value), max_bytes=10))
        assert option(params, half).enabled is value
    assert option(SamplingParams(), half).enabled
    assert half.params_of(SimpleNamespace(), max_bytes=10) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": "abc"},
        {"prediction": {"type": "content", "content": 3}},
        {"prediction": {"type": "image", "content": "abc"}},
        {"prediction": {"content": [{"type": "text"}]}},
        {"speculative": "yes"},
    ],
)
def test_wrong_fields(fields: dict[str, Any]) -> None:
    answer = ask_now(make_house(saying("x"), features=[NAME]).app, PATH, HELLO | fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, next(iter(fields)))


def test_the_server_says_at_its_start_what_drafts() -> None:
    assert text_half().start_rows() == []
    for adaptive, where in ((True, " where that is faster"), (False, "")):
        half = text_half(drafts=DraftInfo("auto", 3, adaptive))
        text = f"auto: up to 3 tokens are drafted{where}; answers stay the same (--spec-method none turns it off)"
        assert half.start_rows() == [("speculation", text)]


def test_wrong_arguments_in_python() -> None:
    for given in (["x"], {"predicted": "a"}, {"prediction": 5}, {"prediction": ["a"]}, {"speculative": "no"}):
        with pytest.raises(InvalidRequestError, match="feature_args"):
            text_half().option(SamplingParams(feature_args={NAME: given}), None, [])
    with pytest.raises(UnsupportedError, match="no speculative decoding"):
        text_half(present=False).option(SamplingParams(feature_args={NAME: {}}), None, [])


def test_without_drafts_a_prediction_is_idle() -> None:
    app = make_house(saying("x")).app
    answer = ask_now(app, PATH, HELLO | {"prediction": {"content": "abc"}, "speculative": False}).json()
    assert answer["warnings"] == [
        "`prediction` has no effect: the server does not draft; start it with --spec-method auto."
    ]
    strict = make_house(saying("x"), ServerConfig(strict_params=True)).app
    assert ask_now(strict, PATH, HELLO | {"speculative": True}).status == 400
    assert text_half(present=False).option(SamplingParams(), None, []) is None


def test_what_is_predicted_is_idle_beside_a_drafting_model() -> None:
    body = SimpleNamespace(prediction={"content": "abc"}, speculative=True)
    for predicts, said in ((True, []), (False, ["prediction"])):
        half = text_half(drafts=DraftInfo("draft_model", 3, True, predicts))
        assert [one.field for one in half.idle(body)] == said
    assert half.idle(body)[0].reason == (
        "the server drafts with draft_model, which reads no predictions; lookup (--spec-method auto) does"
    )


def test_counts_come_with_the_usage() -> None:
    output = CompletionOutput(0, "ab", [5, 6])
    text_half().answer(output, msgspec.msgpack.encode(DraftCounts(3, 4)))
    assert output.drafts == VerifiedDrafts(3, 4)
    config = SimpleNamespace(enable_prompt_tokens_details=False, enable_per_request_metrics=False)
    job = SimpleNamespace(prompt_tokens=[1], request=SimpleNamespace(params=SamplingParams()))
    counter = UsageCounter(SimpleNamespace(config=config), [job])  # type: ignore[arg-type, list-item]
    counter.add(0, RequestOutput("r", None, [1], [output, output], finished=True))
    details = msgspec.to_builtins(counter.usage())["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 8}
    counter.reasoning_tokens = 1
    assert msgspec.to_builtins(counter.usage())["completion_tokens_details"]["reasoning_tokens"] == 1
