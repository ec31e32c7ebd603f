"""Arguments for logits processors on their way to an engine that has some, or has none."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, ask_now, saying

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.engine.fake import FakeEngine, fake_info
from octavo.python_api.async_llm import AsyncLLM
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

EXTRA = {"target": 7, "words": ["a", "b"], "deep": {"x": 1.5}}
ROUTES = [
    ("/v1/chat/completions", HELLO),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
]


def frontend(features: list[str]) -> Frontend:
    info = fake_info(name="toy", vocab_size=VOCAB_SIZE, features=features)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", TOKENIZER)
    return Frontend(FakeEngine(saying("x"), info=info), TOKENIZER, info, chat=template)


def told(front: Frontend) -> Any:
    assert isinstance(front.engine, FakeEngine)
    request = front.engine.requests[-1]
    assert request.params.extra_args is None, "they travel as the feature's option"
    raw = request.options.get("logits_processors")
    return None if raw is None else msgspec.msgpack.decode(raw)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_they_reach_the_engine(path: str, body: dict[str, Any]) -> None:
    front = frontend(["logits_processors"])
    assert ask_now(create_app(front), path, body | {"vllm_xargs": EXTRA}).status == 200
    assert told(front) == EXTRA
    assert ask_now(create_app(front), path, body).status == 200
    assert "logits_processors" in front.engine.requests[-1].options, "processors see every request"  # type: ignore[attr-defined]
    assert told(front) is None


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_without_processors_they_are_refused(path: str, body: dict[str, Any]) -> None:
    front = frontend([])
    answer = ask_now(create_app(front), path, body | {"vllm_xargs": EXTRA})
    assert answer.status == 400
    assert "no logits processors (--logits-processors) that could read extra_args" in answer.body.decode()
    assert ask_now(create_app(front), path, body | {"vllm_xargs": {}}).status == 200
    assert not front.engine.requests[-1].options  # type: ignore[attr-defined]


def test_offline_they_must_be_json() -> None:
    with pytest.raises(InvalidRequestError, match="extra_args must hold JSON values alone"):
        frontend(["logits_processors"]).prepare("a", SamplingParams(extra_args={"x": object()}))


def test_objects_do_not_travel_to_another_process() -> None:
    with pytest.raises(ConfigError, match="name it as 'module:Class'"):
        asyncio.run(AsyncLLM.start("smollm2", logits_processors=[str.upper]))
