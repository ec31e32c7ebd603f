"""Answers that go in circles, and the model's default that ends them: what each API says, and how it is turned off."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, ask_now, saying

from octavo.config import ServerConfig
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

RULE = {"max_pattern_size": 8, "min_count": 2, "min_tokens": 12}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}


def answer(path: str, body: dict[str, Any]) -> Any:
    engine = FakeEngine(saying("so " * 30), info=fake_info(name="toy", vocab_size=VOCAB_SIZE))
    template = ChatTemplate("{{ messages[0].content }}", TOKENIZER)
    frontend = Frontend(engine, TOKENIZER, engine.info, chat=template, default_sampling={"repetition_detection": RULE})
    found = ask_now(create_app(frontend, ServerConfig()), path, body)
    assert found.status == 200, found.body
    return found.json()


def test_chats_and_completions_end_by_repetition() -> None:
    (chat,) = answer("/v1/chat/completions", CHAT)["choices"]
    assert (chat["finish_reason"], chat["message"]["content"]) == ("repetition", "so " * 4)
    (text,) = answer("/v1/completions", {"prompt": "x", "max_tokens": 100})["choices"]
    assert (text["finish_reason"], text["text"]) == ("repetition", "so " * 4)


def test_other_apis_say_that_the_answer_was_cut() -> None:
    response = answer("/v1/responses", {"input": "x", "max_output_tokens": 100})
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "repetition"})
    assert answer("/v1/messages", CHAT)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    "fields",
    [{"repetition_detection": None}, {"ignore_eos": True}, {"repetition_detection": RULE | {"min_tokens": 95}}],
)
def test_a_request_may_go_on(fields: dict[str, Any]) -> None:
    (choice,) = answer("/v1/chat/completions", CHAT | fields)["choices"]
    assert choice["message"]["content"].startswith("so " * 30)
    assert choice["finish_reason"] in ("stop", "length")
