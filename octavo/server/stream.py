"""Server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.burst import burst, next_or_flush
from octavo.server.errors import ApiError, as_api_error
from octavo.server.task import end

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: event parsers skip it, and proxies see that the connection is in use."""
CLIENT_CLOSED_REQUEST = 499

_DATA = b"data: "
_BURST_BYTES = 16 * 1024

_ENCODER = msgspec.json.Encoder()
# Legal in JSON and in events, but clients that split lines with Python's str.splitlines would split here, too.
_LINE_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


class ClientGoneError(Exception):
    """The client disconnected before its request was answered."""


def event(chunk: Any) -> bytes:
    """Return one event with `chunk` as JSON on one line, for any definition of line breaks."""
    return b"data: " + _one_line(chunk) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Return a named event, as some protocols require."""
    return b"event: " + name.encode() + b"\ndata: " + _one_line(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the event for an error after the stream has begun."""
    return b"data: " + error.body() + b"\n\n"


def _one_line(value: Any) -> bytes:
    data = _ENCODER.encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects first. Read the request's body before.

    Raises:
        ClientGoneError: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await end(task)
        await end(watch)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that streams `events` and ends with `closing`.

    Nothing is sent before the first event. A request that fails until then is answered with a plain error response: its
    exception leaves `__call__`. A later failure becomes an error event. If the client disconnects, `events` is closed.

    Args:
        keep_alive_s: seconds without an event after which `keep_alive` is sent, also before the first event; 0 for
            never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        closing: bytes = DONE,
        on_error: Callable[[ApiError], bytes] = error_event,
        keep_alive_s: float = 0.0,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._closing = closing
        self._on_error = on_error
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive

    async def payloads(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event, for other transports. Failures are raised."""
        async with aclosing(self._events) as events:
            async for data in events:
                for line in data.split(b"\n"):
                    if line.startswith(_DATA):
                        yield line[len(_DATA) :]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope.get("state", {}).get("request_id", "")
        try:
            await until_disconnect(receive, self._pump(send, request_id))
        except ClientGoneError:
            return

    async def _pump(self, send: Send, request_id: str) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with (
            aclosing(self._events) as events,
            burst(send, head, self._keep_alive_s, self._keep_alive) as out,
        ):
            try:
                out.add(await anext(events))
                while True:
                    out.add(await next_or_flush(events, out.flush))
                    if out.size > _BURST_BYTES:
                        await out.flush()
            except StopAsyncIteration:
                pass
            except Exception as exc:
                if not out.begun:
                    raise
                out.add(self._on_error(as_api_error(exc, request_id)))
            out.add(self._closing)
            await out.flush(last=True)
