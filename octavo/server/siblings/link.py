"""ASGI over a Unix socket: forwards a request from one process of a server to another.

A connection carries one request. Each ASGI message (specification 3.0, "HTTP & WebSocket") is a frame: four bytes of
length, big-endian, and the message in MessagePack. The first frame is the scope.

HTTP by uvicorn and httpx instead takes 1.1 ms per request (this: 0.2 ms), and httpx reads no response before the whole
body is sent: a client would learn only at the end of its upload that the file is too large.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import ApiError, as_api_error

_CARRIED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_DISCONNECT: Message = {"type": "http.disconnect"}
_LENGTH = 4
_ENDED = "the API process that handled the request has ended"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


@asynccontextmanager
async def listening(app: ASGIApp, path: Path) -> AsyncIterator[None]:
    """Serve `app` on the socket file `path` for the time of the block."""
    running: set[asyncio.Task[None]] = set()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await _answer(app, reader, writer)
        except asyncio.CancelledError:
            pass  # the block has ended; asyncio's streams would log a cancelled task as an error
        finally:
            writer.close()
            running.discard(task)

    server = await asyncio.start_unix_server(meet, str(path))
    try:
        yield
    finally:
        server.close()
        for task in list(running):
            task.cancel()


class Relayed(Response):
    """The response of another process to the same request, forwarded as it arrives."""

    def __init__(self, path: Path, request_id: str) -> None:
        super().__init__()
        self._path = path
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with forwarded(self._path, scope, receive, self._request_id) as messages:
                async for message in messages:
                    await send(message)
        except ConnectionError as exc:
            raise ApiError(503, f"This can't be answered now: {exc}. Try again.", headers={"Retry-After": "1"}) from exc


@asynccontextmanager
async def forwarded(
    path: Path, scope: Scope, receive: Receive, request_id: str = ""
) -> AsyncIterator[AsyncGenerator[Message, None]]:
    """Send a request to the process behind a socket file. Yield the messages of its response as they arrive.

    The messages end early if the client disconnects. Leaving the block tells the process that nobody reads further.

    Raises:
        ConnectionError: the process is not running, or ended before its response was complete.
    """
    async with _connected(path, scope, request_id) as (reader, writer):
        asking = asyncio.create_task(_ask(receive, writer))
        try:
            async with aclosing(_messages(reader, asking)) as messages:
                yield messages
        finally:
            asking.cancel()
            await asyncio.wait({asking})


async def ask(path: Path, method: str, url: str, request_id: str = "") -> tuple[int, bytes]:
    """Send a request without a body to the process behind a socket file. Return status and body. `url` is a path and,
    after a question mark, a query.

    Raises:
        ConnectionError: it is not running, or ended before its response was complete.
    """
    status, parts = 0, []
    plain, _, query = url.partition("?")
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": plain,
        "raw_path": plain.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [],
    }
    async with _connected(path, scope, request_id) as (reader, writer):
        await _write(writer, {"type": "http.request", "body": b"", "more_body": False})
        while (message := await _read(reader)) is not None:
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    return status, b"".join(parts)
    raise ConnectionError(_ENDED)


@asynccontextmanager
async def _connected(
    path: Path, scope: Scope, request_id: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError as exc:
        raise ConnectionError(f"an API process can't be reached: {exc.strerror or exc}") from exc
    tenant = scope.get("state", {}).get("tenant", "")
    try:
        await _write(writer, {name: scope[name] for name in _CARRIED} | {"request_id": request_id, "tenant": tenant})
        yield reader, writer
    finally:
        writer.close()


async def _ask(receive: Receive, writer: asyncio.StreamWriter) -> bool:
    """Forward the request's body, until the client disconnects. Return whether it did."""
    try:
        while (message := await receive())["type"] != "http.disconnect":
            await _write(writer, message)
    except ConnectionError:
        return False
    writer.close()
    return True


async def _messages(reader: asyncio.StreamReader, asking: asyncio.Task[bool]) -> AsyncGenerator[Message, None]:
    """Yield the response's messages to its last one, or until the client disconnects.

    Raises:
        ConnectionError: the response was truncated.
    """
    while (message := await _read(reader)) is not None:
        yield message
        if message["type"] == "http.response.body" and not message.get("more_body"):
            return
    if not (asking.done() and not asking.cancelled() and asking.result()):
        raise ConnectionError(_ENDED)


async def _answer(app: ASGIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    scope = await _read(reader)
    if scope is None:
        return
    state = {"request_id": (request_id := scope.pop("request_id")), "tenant": scope.pop("tenant")}
    scope |= {"asgi": {"version": "3.0"}, "client": None, "server": None, "state": state}
    scope["headers"] = [(name, value) for name, value in scope["headers"]]
    begun = complete = False

    async def receive() -> Message:
        return await _read(reader) or _DISCONNECT

    async def send(message: Message) -> None:
        nonlocal begun, complete
        begun = True
        complete = message["type"] == "http.response.body" and not message.get("more_body")
        with contextlib.suppress(ConnectionError):  # `receive` tells the app; servers drop what nobody reads
            await _write(writer, message)

    try:
        await app(scope, receive, send)
    except ConnectionError:
        pass  # the requesting process has disconnected
    except Exception as exc:
        if not complete:  # otherwise the app has responded to it
            error = as_api_error(exc, request_id)
            if begun:
                return  # the end of the connection tells the other side that the response is truncated
            with contextlib.suppress(ConnectionError):
                await error.response()(scope, receive, send)
    while await _read(reader) is not None:
        pass  # closing before the other side does would discard data that it has not read


async def _read(reader: asyncio.StreamReader) -> Any:
    """Return the next message; None at the end."""
    try:
        length = await reader.readexactly(_LENGTH)
        return _decode(await reader.readexactly(int.from_bytes(length)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    data = _encode(message)
    if writer.is_closing():
        raise ConnectionResetError("the other side has disconnected")
    writer.write(len(data).to_bytes(_LENGTH) + data)
    await writer.drain()
