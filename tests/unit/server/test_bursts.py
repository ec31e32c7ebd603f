"""Streams are written in bursts: all that is ready at once, and nothing kept back while there is nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.burst import next_or_flush
from octavo.server.stream import DONE, EventStream


class Client:
    """Takes messages; each takes a turn of the loop if `slow`."""

    def __init__(self, *, slow: bool = False) -> None:
        self.writes: list[bytes] = []
        self.more: list[bool] = []
        self._slow = slow

    async def send(self, message: Any) -> None:
        if self._slow:
            await asyncio.sleep(0)
        if message["type"] == "http.response.body":
            self.writes.append(message["body"])
            self.more.append(message["more_body"])

    async def receive(self) -> Any:
        await asyncio.Event().wait()


async def read(events: AsyncGenerator[bytes, None], client: Client) -> Client:
    await EventStream(events)({"type": "http"}, client.receive, client.send)
    return client


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.booleans())
def test_what_is_ready_is_written_at_once(waits: list[bool], slow: bool) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for number, wait in enumerate(waits):
            if wait:
                await asyncio.sleep(0)
            yield b"%d," % number

    client = asyncio.run(read(events(), Client(slow=slow)))
    assert b"".join(client.writes) == b"".join(b"%d," % n for n in range(len(waits))) + DONE
    assert len(client.writes) == 1 + sum(waits[1:])
    assert client.more == [True] * sum(waits[1:]) + [False]


def test_a_burst_is_bounded() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield bytes(1000)

    client = asyncio.run(read(events(), Client()))
    assert sum(map(len, client.writes)) == 100_000 + len(DONE)
    assert max(map(len, client.writes)) < 18_000


def test_what_came_before_an_error_is_written() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one,"
        yield b"two,"
        raise ValueError("a fault")

    (write,) = asyncio.run(read(events(), Client())).writes
    assert write.startswith(b'one,two,data: {"error"')
    assert write.endswith(DONE)


def test_an_exception_reaches_a_source_that_waits() -> None:
    heard: list[BaseException] = []

    async def source() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as exc:
            heard.append(exc)
            raise
        yield 1

    async def run() -> None:
        async def flush() -> None: ...

        async def step() -> int:
            return await next_or_flush(source(), flush)

        task = asyncio.create_task(step())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert len(heard) == 1


def test_a_write_that_fails_ends_the_source() -> None:
    closed: list[bool] = []

    async def source() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            closed.append(True)

    async def run() -> None:
        async def flush() -> None:
            raise OSError("the connection is gone")

        with pytest.raises(OSError, match="gone"):
            await next_or_flush(source(), flush)

    asyncio.run(run())
    assert closed == [True]
