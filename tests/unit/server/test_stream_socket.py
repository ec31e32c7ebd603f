"""Generation over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from server_kit import HELLO, ask, eventually, ids, make_house, saying

from octavo.config import ServerConfig
from octavo.core.request import GenerateRequest

COMPLETIONS = "/v1/completions"


class Socket:
    """One WebSocket's client, made by hand."""

    def __init__(self, app: Any, headers: dict[str, str]) -> None:
        self.status = 0
        self.body = b""
        self.broken = False
        self._told: asyncio.Queue[Any] = asyncio.Queue()
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._said.put_nowait({"type": "websocket.connect"})
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": "/v1/stream",
            "raw_path": b"/v1/stream",
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in ({"host": "test"} | headers).items()],
            "subprotocols": [],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "extensions": {"websocket.http.response": {}},
        }
        self.task = asyncio.ensure_future(app(scope, self._said.get, self._send))

    async def _send(self, message: Any) -> None:
        if self.broken:
            raise OSError
        if message["type"] == "websocket.send":
            self._told.put_nowait(json.loads(message["text"]))
        elif message["type"] == "websocket.accept":
            self.status = 101
        elif message["type"] == "websocket.http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")

    def say(self, message: Any) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        self._said.put_nowait({"type": "websocket.receive", "text": text})

    def request(self, name: str, url: str = COMPLETIONS, **body: Any) -> None:
        self.say({"type": "request", "id": name, "url": url, "body": {"prompt": "go", "max_tokens": 50} | body})

    async def hear(self) -> Any:
        async with asyncio.timeout(120):
            return await self._told.get()

    async def answer(self, name: str) -> tuple[list[Any], Any]:
        """The chunks of a request, and its last message; others' messages are skipped."""
        chunks = []
        while True:
            message = await self.hear()
            if message["id"] == name:
                if message["type"] != "chunk":
                    return chunks, message
                chunks.append(message["chunk"])

    async def leave(self) -> None:
        self._said.put_nowait({"type": "websocket.disconnect", "code": 1001})
        await self.task


@asynccontextmanager
async def open_socket(app: Any, **headers: str) -> AsyncIterator[Socket]:
    socket = Socket(app, headers)
    try:
        await eventually(lambda: bool(socket.status))
        yield socket
    finally:
        await socket.leave()


def in_loop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_chunks_are_those_of_the_events() -> None:
    async def scenario() -> None:
        app = make_house(saying("Hello\n\nyou.")).app
        for url, body in (
            ("/v1/chat/completions", HELLO),
            (COMPLETIONS, {"prompt": "go", "max_tokens": 50, "n": 2}),
        ):
            told = {"request_id": "same", "stream_options": {"include_usage": True}} | body
            events = (await ask(app, url, told | {"stream": True})).events()
            async with open_socket(app) as socket:
                socket.request("a", url, **told | ({} if url == COMPLETIONS else {"prompt": None}))
                chunks, last = await socket.answer("a")
            assert last == {"type": "done", "id": "a"}
            for one in [*events, *chunks]:
                one.pop("created")
                one.pop("warnings", None)
            assert chunks == events

    in_loop(scenario)


def test_named_events_and_whole_answers_come_too() -> None:
    async def scenario() -> None:
        app = make_house(saying("Hi")).app
        async with open_socket(app) as socket:
            socket.say({"type": "request", "id": "r", "url": "/v1/responses", "body": {"input": "go"}})
            chunks, last = await socket.answer("r")
            assert chunks[0]["type"] == "response.created"
            assert chunks[-1]["type"] == "response.completed"
            assert last["type"] == "done"
            socket.request("w", stream=False)
            (whole,), last = await socket.answer("w")
            assert whole["object"] == "text_completion"
            assert whole["choices"][0]["text"] == "Hi"
            socket.say({"type": "request", "id": "t", "url": "/tokenize", "body": {"prompt": "abc"}})
            (tokens,), last = await socket.answer("t")
            assert tokens["tokens"] == ids("abc")

    in_loop(scenario)


def test_several_requests_share_a_socket_and_each_is_cancelled_alone() -> None:
    steps = asyncio.Semaphore(40)

    def script(request: GenerateRequest) -> Any:
        return ids("never ending " * 20 if len(request.tokens) > 3 else "short")

    async def pace() -> None:
        await steps.acquire()

    async def scenario() -> None:
        house = make_house(script, pace=pace)
        async with open_socket(house.app) as socket:
            socket.request("long", prompt="long one", max_tokens=400)
            socket.request("short", prompt="go")
            chunks, last = await socket.answer("short")
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "short"
            assert last["type"] == "done"
            assert house.lifecycle.inflight == 1
            socket.say({"type": "cancel", "id": "long"})
            _, last = await socket.answer("long")
            assert last == {"type": "cancelled", "id": "long"}
            await eventually(lambda: not house.engine.running)
            assert len(house.engine.abandoned) == 1
            assert house.lifecycle.inflight == 0
            socket.say({"type": "cancel", "id": "long"})
            assert (await socket.hear())["error"]["code"] == 404
            socket.request("long", prompt="go")  # its id is free again
            for _ in range(20):
                steps.release()
            assert (await socket.answer("long"))[1]["type"] == "done"

    in_loop(scenario)


def test_a_request_and_its_cancel_may_arrive_together() -> None:
    async def scenario() -> None:
        house = make_house(saying("never ending"))
        async with open_socket(house.app) as socket:
            socket.request("a")
            socket.say({"type": "cancel", "id": "a"})
            assert await socket.hear() == {"type": "cancelled", "id": "a"}
            socket.request("a")
            assert (await socket.answer("a"))[1] == {"type": "done", "id": "a"}

    in_loop(scenario)


def test_who_leaves_frees_all_requests() -> None:
    async def scenario() -> None:
        house = make_house(saying("x"), pace=asyncio.Event().wait)
        async with open_socket(house.app) as socket:
            for name in "abc":
                socket.request(name)
            await eventually(lambda: len(house.engine.running) == 3)
        assert not house.engine.running
        assert not house.lifecycle.active
        assert house.lifecycle.inflight == 0

    in_loop(scenario)


def test_a_connection_that_breaks_is_no_fault_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Neither of requests, whose next chunk can't be sent, nor of a bad message, whose error can't be."""

    async def scenario() -> None:
        async with open_socket(make_house(saying("Hello")).app) as socket:
            socket.broken = True
            socket.request("a")
            socket.request("b")
            socket.say("garbage")
            await socket.task

    in_loop(scenario)
    assert not caplog.records


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ("{", 400, ["JSON"]),
        ("[]", 400, ["object"]),
        ({"type": "request", "body": {}}, 400, ["id"]),
        ({"type": "request", "id": "", "body": {}}, 400, ["id"]),
        ({"type": "wish", "id": "a"}, 400, ["type", "wish"]),
        ({"type": "request", "id": "a"}, 400, ["body"]),
        ({"type": "request", "id": "a", "url": "/v1/dreams", "body": {}}, 404, ["/v1/dreams", COMPLETIONS]),
        ({"type": "request", "id": "a", "url": COMPLETIONS, "body": {}}, 400, ["prompt"]),
        ({"type": "request", "id": "a", "body": HELLO | {"temperature": -1}}, 400, ["temperature"]),
    ],
)
def test_a_bad_message_is_answered_and_the_socket_lives_on(message: Any, code: int, words: list[str]) -> None:
    async def scenario() -> None:
        async with open_socket(make_house(saying("ok")).app) as socket:
            socket.say(message)
            told = await socket.hear()
            assert told["type"] == "error"
            assert told["error"]["code"] == code
            assert all(word in told["error"]["message"] for word in words), told
            assert told["id"] == (message.get("id") or None if isinstance(message, dict) else None)
            socket.request("good")
            assert (await socket.answer("good"))[1]["type"] == "done"

    in_loop(scenario)


def test_one_id_is_one_request() -> None:
    async def scenario() -> None:
        house = make_house(saying("x"), pace=asyncio.Event().wait)
        async with open_socket(house.app) as socket:
            socket.request("a")
            socket.request("a")
            error = (await socket.hear())["error"]
            assert (error["code"], error["param"]) == (400, "id")
            assert len(house.engine.running) <= 1

    in_loop(scenario)


def test_keys_open_sockets_as_they_open_routes() -> None:
    async def scenario() -> None:
        app = make_house(saying("x"), ServerConfig(api_keys=("k",))).app
        async with open_socket(app) as socket:
            assert socket.status == 401
            assert json.loads(socket.body)["error"]["type"] == "AuthenticationError"
        for headers in ({"authorization": "Bearer k"}, {"x-api-key": "k"}):
            async with open_socket(app, **headers) as socket:
                assert socket.status == 101

    in_loop(scenario)


@pytest.mark.parametrize(("by", "expected"), [("api-key", "team"), ("header:x-team", "blue"), ("user", "ann")])
def test_requests_are_of_the_tenant_that_opened_the_socket(by: str, expected: str) -> None:
    async def scenario() -> None:
        house = make_house(saying("x"), ServerConfig(api_keys=("k name=team",), tenant_by=by))
        headers = {"authorization": "Bearer k", "x-team": "blue"}
        async with open_socket(house.app, **headers) as socket:
            socket.request("a", prompt="hi", user="ann")
            await eventually(lambda: len(house.engine.requests) == 1)
        assert [one.tenant for one in house.engine.requests] == [expected]
        house = make_house(saying("x"), ServerConfig(tenant_by="header:x-team"))
        async with open_socket(house.app, **{"x-team": "a" * 129}) as socket:
            assert socket.status == 400

    in_loop(scenario)


def test_pages_of_other_sites_are_refused_unless_named() -> None:
    async def scenario() -> None:
        app = make_house(saying("x")).app
        for origin, status in (("https://evil.example", 403), ("http://test", 101), ("null", 403)):
            async with open_socket(app, origin=origin) as socket:
                assert socket.status == status
        named = make_house(saying("x"), ServerConfig(allowed_origins=("https://a.example",))).app
        async with open_socket(named, origin="https://a.example") as socket:
            assert socket.status == 101

    in_loop(scenario)


def test_a_server_that_shuts_down_takes_no_requests() -> None:
    async def scenario() -> None:
        house = make_house(saying("x"))
        async with open_socket(house.app) as socket:
            house.lifecycle.drain()
            socket.request("a")
            assert (await socket.hear())["error"]["code"] == 503
        async with open_socket(house.app) as socket:
            assert socket.status == 503

    in_loop(scenario)
