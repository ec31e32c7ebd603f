"""Middleware of the user's own, from the flag to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from server_kit import HELLO, House, Visitor, ask_now, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.server.middleware import load_middleware
from octavo.server.process.run import run_server
from octavo.text.frontend import Frontend

CHAT = "/v1/chat/completions"
MODULE = """
from starlette.responses import PlainTextResponse

class Stamp:
    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-way", b"class")]
            await send(message)
        await self._app(scope, receive, stamped)

async def called(request, call_next):
    answer = await call_next(request)
    answer.headers["x-way"] = f"function {answer.headers.get('x-way', '')}"
    return answer

async def closed(request, call_next):
    return PlainTextResponse("closed on Sundays", 403)

def plain(request, call_next): ...
class Needy:
    def __init__(self, app, more): ...
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_middleware.py").write_text(MODULE)
    (tmp_path / "broken_middleware.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(str(tmp_path))


def house(*names: str, **config: object) -> House:
    paths = tuple(f"own_middleware{name}" for name in names)
    return make_house(saying("some text"), ServerConfig(middleware=paths, **config))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [".Stamp", ":Stamp", ".called"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_pass_through_it(name: str, stream: bool) -> None:
    answer = ask_now(house(name).app, CHAT, HELLO | {"stream": stream})
    assert answer.status == 200
    assert answer.headers["x-way"].split() == (["function"] if "called" in name else ["class"])
    if stream:
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in answer.events()) == "some text"


def test_the_last_is_outermost() -> None:
    assert ask_now(house(".Stamp", ".called").app, CHAT, HELLO).headers["x-way"] == "function class"


def test_it_comes_before_the_api_key() -> None:
    app = house(".closed", api_keys=("key",)).app
    answer = get_now(app, "/v1/models")
    assert (answer.status, answer.body) == (403, b"closed on Sundays")


@pytest.mark.parametrize("name", [".Stamp", ".called"])
def test_a_client_that_leaves_frees_its_request(name: str) -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(3)
        paths = (f"own_middleware{name}",)
        made = make_house(saying("a long answer"), ServerConfig(middleware=paths), pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(made.app, CHAT, HELLO | {"stream": True})
        await visitor.heard.wait()
        visitor.leaves.set()
        async with asyncio.timeout(240):
            await visitor.whole()
            await made.lifecycle.idle.wait()
        assert made.engine.abandoned == [made.engine.requests[0].id]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_middleware", "must have the form"),
        ("own_middleware.", "must have the form"),
        ("own_middleware.Missing", "has no Missing"),
        ("not_there_at_all.Stamp", "can't be imported: ModuleNotFoundError"),
        ("broken_middleware.Stamp", "can't be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("own_middleware.plain", "must be an ASGI class"),
        ("own_middleware.Needy", "must be an ASGI class"),
    ],
)
def test_what_is_none_is_refused(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--middleware '?{path}.*{said}"):
        load_middleware([path])


def test_it_is_refused_before_the_engine_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    @asynccontextmanager
    async def never() -> AsyncIterator[Frontend]:
        raise AssertionError("started")
        yield

    assert run_server(never, ServerConfig(port=0, middleware=("own_middleware.Missing",))) == 1
    assert "has no Missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "role"),
    [
        ({}, "narrator"),
        ({"add_generation_prompt": False}, "user"),
        ({"continue_final_message": True}, "user"),
    ],
)
def test_the_role_of_answers(more: dict[str, bool], role: str) -> None:
    made = make_house(saying("some text"), ServerConfig(response_role="narrator"))
    assert ask_now(made.app, CHAT, HELLO | more).json()["choices"][0]["message"]["role"] == role
    first = ask_now(made.app, CHAT, HELLO | more | {"stream": True}).events()[0]
    assert first["choices"][0]["delta"]["role"] == role
