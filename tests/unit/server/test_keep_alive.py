"""A stream that is silent says so now and then, and costs nothing by it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from server_kit import HELLO, Visitor, ask_now, eventually, ids, make_house, saying
from starlette.types import Message

from octavo.config import ServerConfig
from octavo.core.errors import InvalidRequestError
from octavo.server.burst import BeatingBurst
from octavo.server.stream import KEEP_ALIVE, EventStream

OFTEN = ServerConfig(sse_keep_alive_s=0.002)
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}
STREAMED: list[tuple[str, dict[str, Any], bytes]] = [
    ("/v1/chat/completions", HELLO, KEEP_ALIVE),
    ("/v1/completions", {"prompt": "Hello"}, KEEP_ALIVE),
    ("/v1/responses", {"input": "Hello"}, KEEP_ALIVE),
    ("/v1/messages", HELLO | {"max_tokens": 9}, PING),
    ("/inference/v1/generate", {"token_ids": ids("Hello")}, KEEP_ALIVE),
]


@pytest.mark.parametrize(("path", "body", "beat"), STREAMED)
def test_beats_come_before_the_first_token_and_between_tokens(path: str, body: dict[str, Any], beat: bytes) -> None:
    headers = {"x-request-id": "one"}

    async def scenario() -> bytes:
        steps = asyncio.Semaphore(0)
        house = make_house(saying("abc"), OFTEN, pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, path, body | {"stream": True}, headers=headers)
        pieces = visitor.answer.pieces
        await eventually(lambda: pieces[:2] == [beat] * 2)
        for _ in range(2):
            steps.release()
        await eventually(lambda: set(pieces) > {beat})
        before = len(pieces)
        await eventually(lambda: beat in pieces[before:])
        for _ in range(20):
            steps.release()
        answer = await visitor.whole()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        return b"".join(piece for piece in answer.pieces if piece != beat)

    heard = asyncio.run(scenario())
    plain = ask_now(make_house(saying("abc")).app, path, body | {"stream": True}, headers=headers).body
    assert shapes(heard) == shapes(plain)
    assert beat not in plain


def shapes(stream: bytes) -> bytes:
    """The events without what differs from one answer to the next."""
    return re.sub(rb'"(id|item_id|created|\w+_at)":[^,}]*', b"", stream)


def test_an_error_after_a_beat_is_an_event() -> None:
    go = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await go.wait()
        raise InvalidRequestError("It is too long.")
        yield b""

    async def scenario() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def first() -> None:
            await eventually(lambda: len(sent) > 1)
            go.set()

        stream = EventStream(events(), keep_alive_s=0.002)
        await asyncio.gather(stream({"type": "http"}, receive, send), first())
        return sent

    head, *beats, last = asyncio.run(scenario())
    assert head["status"] == 200
    assert {beat["body"] for beat in beats} == {KEEP_ALIVE}
    assert b"It is too long." in last["body"]
    assert not last["more_body"]


def test_a_reader_that_is_slow_is_sent_no_beats() -> None:
    """What waits for it is one message, however long it takes."""

    async def scenario() -> None:
        stuck, free = asyncio.Event(), asyncio.Event()
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                stuck.set()
                await free.wait()

        clock: list[Message] = []

        async def tick(message: Message) -> None:
            clock.append(message)

        slow, other = BeatingBurst(send, HEAD, 0.002, b"beat"), BeatingBurst(tick, HEAD, 0.002, b"beat")
        slow.add(b"text")
        flush = asyncio.create_task(slow.flush())
        await stuck.wait()
        beats = [asyncio.create_task(one.beat()) for one in (slow, other)]
        await eventually(lambda: len(clock) > 10)
        assert len(sent) == 2
        free.set()
        await flush
        await eventually(lambda: len(sent) > 2)
        assert sent[2]["body"] == b"beat"
        for beat in beats:
            beat.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("silence_s", [0.0, 60.0])
def test_events_set_no_timers(silence_s: float) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            await asyncio.sleep(0)
            yield b"x"

    async def scenario() -> int:
        loop, timers = asyncio.get_running_loop(), 0
        call_at = loop.call_at

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal timers
            timers += 1
            return call_at(*args, **kwargs)

        loop.call_at = counted  # type: ignore[method-assign]
        bodies: list[bytes] = []

        async def send(message: Message) -> None:
            bodies.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.Event().wait()

        await EventStream(events(), keep_alive_s=silence_s)({"type": "http"}, receive, send)
        assert len(bodies) > 100
        return timers

    assert asyncio.run(scenario()) == (1 if silence_s else 0)
