"""A thinking budget by each of its names: what the engine is asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, Answer, ask_now, saying

from octavo.config import ServerConfig
from octavo.engine.fake import FakeEngine, fake_info
from octavo.features.thinking.budget import ThinkingBudget
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

CHAT = "/v1/chat/completions"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
THINKING = "{# </think> #}" + PLAIN + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"


class Place:
    def __init__(
        self, template: str = THINKING, features: list[str] | None = None, size: int = VOCAB_SIZE, **settings: Any
    ) -> None:
        info = fake_info(name="toy", vocab_size=size, features=features or ["grammar", "thinking"])
        self.engine = FakeEngine(saying("x"), info=info)
        frontend = Frontend(self.engine, TOKENIZER, info, chat=ChatTemplate(template, TOKENIZER))
        self.app = create_app(frontend, ServerConfig(**settings))

    def ask(self, path: str, body: dict[str, Any]) -> Answer:
        return ask_now(self.app, path, body)

    def budget(self, path: str, body: dict[str, Any]) -> ThinkingBudget | None:
        assert self.ask(path, body).status == 200
        raw = self.engine.requests[-1].options.get("thinking")
        return None if raw is None else msgspec.msgpack.decode(raw, type=ThinkingBudget)


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "max_thinking_tokens"])
def test_each_name_means_the_same(name: str) -> None:
    budget = Place().budget(CHAT, HELLO | {name: 7})
    assert budget == ThinkingBudget(tokens=7, begin="<think>", end="</think>", open=True)


def test_a_model_that_lacks_the_end_mark_can_not_keep_a_budget() -> None:
    size = max(TOKENIZER.encode("</think>", add_special_tokens=False))
    prompt = {"prompt": [0], "max_tokens": 2}
    answer = Place(size=size).ask("/v1/completions", prompt | {"thinking_token_budget": 7})
    assert answer.status == 400
    assert "lacks a token of </think>" in answer.json()["error"]["message"]
    assert Place(size=size).ask("/v1/completions", prompt).status == 200


def test_every_endpoint_has_it() -> None:
    place = Place()
    thinking = {"type": "enabled", "budget_tokens": 9}
    budget = place.budget("/v1/messages", HELLO | {"max_tokens": 20, "thinking": thinking})
    assert budget is not None
    assert (budget.tokens, budget.open) == (9, True)
    assert place.budget("/v1/responses", {"input": "a", "thinking_token_budget": 3}) is not None
    budget = place.budget("/v1/completions", {"prompt": "a", "thinking_token_budget": 3})
    assert budget is not None
    assert not budget.open
    budget = place.budget("/v1/completions", {"prompt": "a<think>\n", "thinking_token_budget": 3})
    assert budget is not None
    assert budget.open


def test_where_there_is_none_to_bound() -> None:
    assert Place(PLAIN).budget(CHAT, HELLO | {"thinking_budget": 7}) is None
    assert Place().budget(CHAT, HELLO | {"thinking_budget": -1}) is None
    assert Place().budget("/v1/messages", HELLO | {"max_tokens": 20, "thinking": {"type": "adaptive"}}) is None
    off = Place().budget(CHAT, HELLO | {"thinking_budget": 7, "reasoning_effort": "none"})
    assert off is not None
    assert not off.open


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, HELLO | {"thinking_budget": 7}, "thinking_budget"),
        ("/v1/completions", {"prompt": "a", "thinking_token_budget": 0}, "thinking_token_budget"),
        ("/v1/responses", {"input": "a", "max_thinking_tokens": 7}, "max_thinking_tokens"),
        (
            "/v1/messages",
            HELLO | {"max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking_token_budget",
        ),
    ],
)
def test_a_model_without_reasoning_says_so(
    path: str, body: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = Place(PLAIN).ask(path, body).json()["warnings"]
    assert warning.startswith(f"`{name}` has no effect: this model marks no reasoning")
    assert "--reasoning-parser" in warning
    assert "a thinking budget has no effect" in caplog.text
    assert "warnings" not in Place().ask(path, body).json()
    answer = Place(PLAIN, strict_params=True).ask(path, body)
    assert answer.status == 400
    assert f"{name} has no effect" in answer.body.decode()
    assert Place(strict_params=True).ask(path, body).status == 200


@pytest.mark.features("beams")
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"thinking_budget": -2}, "thinking_budget"),
        (CHAT, {"thinking_budget": 3, "max_thinking_tokens": 4}, "thinking_budget"),
        (CHAT, {"thinking_budget": True}, "thinking_budget"),
        ("/v1/messages", {"max_tokens": 5, "thinking": {"type": "enabled"}}, "thinking"),
        ("/v1/messages", {"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking"),
        (CHAT, {"thinking_budget": 3, "use_beam_search": True, "n": 2}, "thinking_token_budget"),
    ],
)
def test_what_is_none(path: str, fields: dict[str, Any], param: str) -> None:
    answer = Place().ask(path, HELLO | fields)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param


def test_an_engine_without_the_feature_says_so() -> None:
    answer = Place(features=["grammar"]).ask(CHAT, HELLO | {"thinking_budget": 7})
    assert answer.status == 400
    assert "no thinking budget" in answer.error()["message"]
