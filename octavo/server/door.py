"""Middleware around all routes.

It assigns request ids, checks API keys, refuses work while the server drains, counts requests, and converts unexpected
exceptions to error objects.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import ServerConfig
from octavo.server.anthropic.errors import REQUEST_ID, speaks_anthropic
from octavo.server.error_forms import error_response
from octavo.server.errors import ApiError, as_api_error
from octavo.server.load_header import ASKED, TOLD
from octavo.server.metrics.http import HttpMetrics
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.stream import CLIENT_CLOSED_REQUEST
from octavo.server.tenants import ApiKeys, Tenants

_SLOWEST = 16 * 1024
"""Bytes per second: the rate at which a request's body may arrive without a time limit."""
_OPEN_PATHS = frozenset(
    {
        "/",
        "/health",
        "/live",
        "/ready",
        "/ping",
        "/version",
        "/metrics",
        "/docs",
        "/redoc",
        "/openapi.json",
    }
)
_PRINTABLE_ID = re.compile(r"[!-~]{1,128}")


class DoorContext(Protocol):
    """The state of a server that its door uses."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    @property
    def http(self) -> HttpMetrics: ...

    @property
    def keys(self) -> ApiKeys: ...

    @property
    def tenants(self) -> Tenants: ...

    def load_header(self, form: str) -> str | None:
        """Return the load for a response header, in the form that a request asks for."""
        ...


def key_error() -> ApiError:
    """Return the error for a missing or wrong key."""
    return ApiError(
        401,
        "A valid API key is required: send 'Authorization: Bearer <key>' or 'x-api-key: <key>'.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def busy(ctx: DoorContext, method: str = "POST") -> ApiError | None:
    """Return the reason why the server accepts no work now, or None."""
    most = ctx.config.max_concurrent_requests
    if most is not None and ctx.lifecycle.inflight_everywhere >= most:
        return ApiError(
            503,
            f"The server answers {most} requests at once, as many as --max-concurrent-requests allows; try again "
            "later.",
            headers={"Retry-After": "1"},
        )
    if ctx.lifecycle.draining and method == "POST":
        return ApiError(503, "The server is shutting down and takes no new requests.", headers={"Retry-After": "5"})
    return None


class Door:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, *, ctx: DoorContext) -> None:
        self._app = app
        self._ctx = ctx
        self._keys = ctx.keys
        # Requests are accepted with and without the root path: some proxies remove it, others don't.
        self._root = ctx.config.root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_last_slash(scope)
        method = scope["method"]
        if method == "HEAD":  # handled as GET by every route that has one; `_ResponseWatch` leaves the body out
            scope = {**scope, "method": "GET"}
        names = ("X-Request-Id", REQUEST_ID) if speaks_anthropic(scope) else ("X-Request-Id",)
        sent = Headers(scope=scope)
        visit = _ResponseWatch(send, _request_id(sent), names, bodiless=method == "HEAD")
        if ASKED in sent:
            visit.load = self._ctx.load_header(sent[ASKED])
        scope.setdefault("state", {})["request_id"] = visit.request_id
        started = time.monotonic()
        try:
            await self._answer(scope, receive, visit.send)
        except Exception as exc:
            error = as_api_error(exc, visit.request_id)
            if not visit.status:
                await error_response(scope, error)(scope, receive, visit.send)
            else:
                raise
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            seconds = time.monotonic() - started
            status = visit.status or CLIENT_CLOSED_REQUEST
            self._ctx.http.observe(handler, method, status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if plain_path(scope) in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(scope, refusal)(scope, receive, send)
            return
        # A process before this one has checked the key that names it.
        found = scope["state"].get("tenant") or self._ctx.tenants.of_headers(Headers(scope=scope))
        scope["state"]["tenant"] = found
        with self._ctx.lifecycle.serving():
            await self._app(scope, _in_time(receive, self._ctx.config.body_timeout_s), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope["method"] != "OPTIONS" and not self._keys.allow(Headers(scope=scope)):
            return key_error()
        return busy(self._ctx, scope["method"])


class _ResponseWatch:
    """Records the status of one response and adds the request id to its headers.

    Attributes:
        load: the engine's load for a response header, if the client asked for it.
    """

    __slots__ = ("_bodiless", "_names", "_send", "load", "request_id", "status")

    def __init__(self, send: Send, request_id: str, names: tuple[str, ...], *, bodiless: bool) -> None:
        self._send = send
        self._bodiless = bodiless
        self._names = names
        self.request_id = request_id
        self.load: str | None = None
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name in self._names:
                headers.setdefault(name, self.request_id)  # a process behind this one may have chosen the id
            if self.load is not None:
                headers[TOLD] = self.load
        elif self._bodiless:
            message = {**message, "body": b""}
        await self._send(message)


def _in_time(receive: Receive, seconds: float) -> Receive:
    """Return `receive` with a time limit on the body; no limit applies after its end.

    Received data extends the limit at the rate of `_SLOWEST`: large files may take long, but a body can't be stretched
    indefinitely.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    complete = False

    async def limited() -> Message:
        nonlocal complete, deadline
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"The request's body arrived too slowly: it may take {seconds:g} s, and a second more for each "
                f"{_SLOWEST:,} bytes. Send it faster, or start the server with a longer --body-timeout.",
                headers={"Connection": "close"},
            ) from None
        complete = not message.get("more_body", False)
        deadline += len(message.get("body", b"")) / _SLOWEST
        return message

    return limited


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _PRINTABLE_ID.fullmatch(given) else uuid.uuid4().hex


def _without_last_slash(scope: Scope) -> Scope:
    """Return the scope of a path as routes have it. The router would redirect to it, to `http` also behind TLS."""
    path: str = scope["path"]
    plain = path.removesuffix("/")
    if plain in (path, "", scope["root_path"]):
        return scope
    return {**scope, "path": plain, "raw_path": (scope.get("raw_path") or b"").removesuffix(b"/")}


def plain_path(scope: Scope) -> str:
    """Return the path of a request without the root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) or "/" if root else path
