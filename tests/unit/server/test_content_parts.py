"""Contents in parts reach a template that goes through them as parts, and others as one string, on every route."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, ask_now, saying

from octavo.config import ServerConfig
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

GOING_THROUGH = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
WRITING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def parts(kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": "a"}, {"type": kind, "text": "b"}]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": parts()}, {"role": "user", "content": parts()}],
    },
    "/v1/responses": {
        "input": [{"role": "system", "content": parts("input_text")}, {"role": "user", "content": parts("input_text")}],
    },
    "/v1/messages": {"max_tokens": 9, "system": parts(), "messages": [{"role": "user", "content": parts()}]},
}


def prompt(path: str, template: str) -> str:
    info = fake_info(name="toy", vocab_size=VOCAB_SIZE)
    engine = FakeEngine(saying("x"), info=info)
    frontend = Frontend(engine, TOKENIZER, info, chat=ChatTemplate(template, TOKENIZER))
    assert ask_now(create_app(frontend, ServerConfig()), path, BODIES[path]).status == 200
    return TOKENIZER.decode(engine.requests[-1].tokens, skip_special_tokens=False)


@pytest.mark.parametrize("path", BODIES)
def test_parts_reach_the_template(path: str) -> None:
    assert prompt(path, GOING_THROUGH) == "[system]<a\nb>[user]<a><b>"
    assert prompt(path, WRITING) == "[system]a\nb[user]a\nb"
