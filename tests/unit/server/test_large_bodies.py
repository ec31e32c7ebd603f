"""Requests of many parts are read in a thread, so that the streams of others continue meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from pydantic import BaseModel, field_validator
from server_kit import ask_now, make_house, saying
from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.server.body import parse_body
from octavo.server.errors import ApiError
from octavo.server.openai import messages

CHAT = "/v1/chat/completions"
LARGE = 1 << 20


class Body(BaseModel):
    text: str

    @field_validator("text")
    @classmethod
    def _seen(cls, value: str) -> str:
        """Replace the text by where it was validated."""
        return "here" if threading.current_thread() is threading.main_thread() else "in a thread"


def parsed(data: bytes) -> Body:
    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    return asyncio.run(parse_body(Request({"type": "http", "headers": []}, receive), Body, 2 * LARGE))


def test_a_large_body_is_parsed_in_a_thread() -> None:
    assert parsed(json.dumps({"text": "x" * LARGE}).encode()).text == "in a thread"
    assert parsed(b'{"text": "x"}').text == "here"


def test_a_fault_in_a_large_body_is_told() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parsed(b'{"text": "' + b"x" * LARGE)


def test_many_short_messages_are_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    convert = messages.template_message

    def watched(number: int, message: Any) -> Any:
        threads.add(threading.current_thread())
        return convert(number, message)

    monkeypatch.setattr(messages, "template_message", watched)
    app = make_house(saying("fine"), ServerConfig()).app
    for count, in_thread in ((1, False), (1000, True)):
        threads.clear()
        said = [{"role": "user", "content": "a"}] * count
        assert ask_now(app, CHAT, {"messages": said, "max_tokens": 1}).status in (200, 400)
        assert (threads != {threading.main_thread()}) == in_thread
