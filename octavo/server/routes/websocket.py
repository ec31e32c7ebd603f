"""`/v1/stream`: generation over a WebSocket (RFC 6455), with several requests per socket, each cancellable.

The client sends JSON, one object per message:

    {"type": "request", "id": "a", "url": "/v1/chat/completions", "body": {...}}
    {"type": "cancel", "id": "a"}

For each request it gets the chunks that the route would send as events, and then one of the other messages:

    {"type": "chunk", "id": "a", "chunk": {...}}
    {"type": "done", "id": "a"}
    {"type": "cancelled", "id": "a"}
    {"type": "error", "id": "a", "error": {"message", "type", "param", "code"}}

An error without an id is about an invalid message; the socket stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo.core.errors import InvalidRequestError
from octavo.server.body import decode_json
from octavo.server.door import DoorContext, busy, key_error
from octavo.server.errors import ApiError, as_api_error
from octavo.server.routes.endpoints import Endpoint, inner_request
from octavo.server.stream import EventStream

CHAT = "/v1/chat/completions"
STREAMED = frozenset({CHAT, "/v1/completions", "/v1/responses", "/v1/messages"})
MAX_REQUESTS = 256
"""Maximum number of concurrent requests on one socket."""
_GONE = 1006
"""Close code of a connection that ended without one (RFC 6455, 7.4.1)."""


class StreamSocket:
    """The route.

    Args:
        endpoints: path -> handler of a POST to it.
    """

    def __init__(self, ctx: DoorContext, endpoints: Mapping[str, Endpoint]) -> None:
        self._ctx = ctx
        self._endpoints = endpoints

    async def __call__(self, socket: WebSocket) -> None:
        """Serve one socket until it is closed; then cancel its requests."""
        try:
            refusal, tenant = self._refusal(socket.headers), self._ctx.tenants.of_headers(socket.headers)
        except InvalidRequestError as exc:
            refusal, tenant = as_api_error(exc), ""
        if refusal is not None:
            await socket.send_denial_response(refusal.response())
            return
        await socket.accept()
        visit = _SocketSession(self._ctx, self._endpoints, socket, tenant)
        try:
            while True:
                await visit.take(await socket.receive())
        except WebSocketDisconnect:
            pass
        finally:
            await visit.end()

    def _refusal(self, headers: Headers) -> ApiError | None:
        if not self._ctx.keys.allow(headers):
            return key_error()
        origin, allowed = headers.get("origin"), self._ctx.config.allowed_origins
        if origin and origin not in allowed and "*" not in allowed and urlsplit(origin).netloc != headers.get("host"):
            # Browsers let any page open a socket to any host; the server has to refuse.
            return ApiError(403, f"Pages of {origin} may not use this server; name it with --allowed-origins.")
        return busy(self._ctx)


class _SocketSession:
    """One open socket."""

    def __init__(self, ctx: DoorContext, endpoints: Mapping[str, Endpoint], socket: WebSocket, tenant: str) -> None:
        self._ctx = ctx
        self._endpoints = endpoints
        self._socket = socket
        self._tenant = tenant
        self._running: dict[str, asyncio.Task[None]] = {}

    async def take(self, message: Mapping[str, Any]) -> None:
        """Handle a message.

        Raises:
            WebSocketDisconnect: the client has disconnected.
        """
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1000)
        request_id: str | None = None
        try:
            data = message.get("bytes")
            asked = decode_json(data if data is not None else message["text"].encode())
            request_id = _id_of(asked)
            await self._do(request_id, asked)
        except (ApiError, InvalidRequestError) as exc:
            await self._tell(_error(request_id, as_api_error(exc)))

    async def end(self) -> None:
        """Cancel the running requests and wait for their ends."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _do(self, request_id: str, asked: Mapping[str, Any]) -> None:
        match asked.get("type"):
            case "request":
                self._begin(request_id, asked)
                await asyncio.sleep(0)  # a task that is cancelled before it begins sends no outcome
            case "cancel":
                if request_id not in self._running:
                    raise ApiError(404, f"No request {request_id!r} is running on this socket.", param="id")
                task = self._running[request_id]
                if not task.cancelling():
                    task.cancel()
            case kind:
                raise ApiError(400, f"type must be request or cancel, got {kind!r}.", param="type")

    def _begin(self, request_id: str, asked: Mapping[str, Any]) -> None:
        url, body = asked.get("url", CHAT), asked.get("body")
        if (refusal := busy(self._ctx)) is not None:
            raise refusal
        if request_id in self._running:
            raise ApiError(400, f"A request {request_id!r} is running on this socket; choose another id.", param="id")
        if len(self._running) >= MAX_REQUESTS:
            raise ApiError(429, f"{MAX_REQUESTS} requests are running on this socket, which is the most it may have.")
        if not isinstance(url, str) or url not in self._endpoints:
            raise ApiError(404, f"url must be one of {', '.join(sorted(self._endpoints))}; got {url!r}.", param="url")
        if not isinstance(body, dict):
            raise ApiError(400, "body is required: the JSON object that would be posted to the url.", param="body")
        if url in STREAMED:
            body = {"stream": True, **body}
        task = asyncio.create_task(self._answer(request_id, url, body))
        self._running[request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    async def _answer(self, request_id: str, url: str, body: dict[str, Any]) -> None:
        """Send one whole answer, and its outcome."""
        with self._ctx.lifecycle.serving():
            last = _last("done", request_id)
            try:
                async with aclosing(self._chunks(url, body)) as chunks:
                    async for chunk in chunks:
                        await self._tell(_chunk(request_id, chunk))
            except asyncio.CancelledError:
                last = _last("cancelled", request_id)
            except WebSocketDisconnect:
                return
            except Exception as exc:
                last = _error(request_id, as_api_error(exc, request_id))
            with contextlib.suppress(WebSocketDisconnect):
                await self._tell(last)

    async def _chunks(self, url: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the JSON of each event, or of the single answer."""
        request = inner_request(url, msgspec.json.encode(body), secrets.token_hex(16), self._tenant)
        response = await self._endpoints[url](request)
        if not isinstance(response, EventStream):
            yield bytes(response.body)
            return
        async with aclosing(response.payloads()) as payloads:
            async for payload in payloads:
                yield payload

    async def _tell(self, message: bytes) -> None:
        """Send a message.

        Raises:
            WebSocketDisconnect: the client has disconnected.
        """
        try:
            await self._socket.send_text(message.decode())
        except RuntimeError:  # after the first send that failed
            raise WebSocketDisconnect(_GONE) from None


def _id_of(asked: Mapping[str, Any]) -> str:
    found = asked.get("id")
    if not isinstance(found, str) or not 0 < len(found) <= 128 or not found.isprintable():
        text = "id must be a string of 1 to 128 printable characters; it is repeated in the answers."
        raise ApiError(400, text, param="id")
    return found


def _chunk(request_id: str, chunk: bytes) -> bytes:
    return b'{"type":"chunk","id":' + msgspec.json.encode(request_id) + b',"chunk":' + chunk + b"}"


def _last(kind: str, request_id: str) -> bytes:
    return msgspec.json.encode({"type": kind, "id": request_id})


def _error(request_id: str | None, error: ApiError) -> bytes:
    told: dict[str, Any] = {"type": "error", "id": request_id}
    return msgspec.json.encode(told | msgspec.json.decode(error.body()))
