"""The application of the front process: it answers what concerns all models, and forwards everything else to one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from octavo.config import ServerConfig
from octavo.hub.cache import data_dir
from octavo.pool.inner import Endpoints
from octavo.pool.metrics import PoolMetrics
from octavo.pool.models import Models
from octavo.pool.naming import Body, named_body, query_model
from octavo.pool.overview import Overview
from octavo.pool.pool import Pool, running
from octavo.pool.relay import first_answer, leased, relay
from octavo.server import errors
from octavo.server.batch.execute import LineExecutor
from octavo.server.batch.routes import batch_routes
from octavo.server.batch.service import BatchService
from octavo.server.cors import cors_middleware
from octavo.server.door import Door, plain_path
from octavo.server.error_forms import error_response
from octavo.server.errors import ApiError
from octavo.server.metrics.http import HttpMetrics
from octavo.server.middleware import load_middleware
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.routes.docs import docs_routes
from octavo.server.routes.websocket import StreamSocket
from octavo.server.stream import ClientGoneError
from octavo.server.tenants import ApiKeys, Tenants

_AROUND = 64 * 1024
"""Bytes of a form besides its file."""
_RESPONSES = "/v1/responses/"
_COUNT = "/v1/responses/input_tokens"
_BATCHES = ("/v1/files", "/v1/batches")
_SLEEP = frozenset({"/sleep", "/wake_up"})
_CONCURRENCY = 64
FORWARDED = "forwarded"
"""The handler's name of requests that a model's process counts itself."""


@dataclass(slots=True)
class FrontContext:
    """The state that the door uses."""

    config: ServerConfig
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    http: HttpMetrics = field(default_factory=lambda: OwnRequests())
    keys: ApiKeys = field(init=False)
    tenants: Tenants = field(init=False)

    def __post_init__(self) -> None:
        self.keys = ApiKeys(self.config.api_keys)
        self.tenants = Tenants(self.config.tenant_by, self.keys)

    def load_header(self, form: str) -> str | None:
        """Return None: the model's process adds the header."""
        return None


class OwnRequests(HttpMetrics):
    """Counts the requests that the front process answers itself."""

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        if handler != FORWARDED:
            HttpMetrics.observe(self, handler, method, status, seconds)


@dataclass(frozen=True, slots=True)
class _Handler:
    """What stands for a route in `scope`."""

    path: str


class Front:
    """The application without its door.

    Attributes:
        batches: files and batches, whose lines may name any model.
    """

    def __init__(self, pool: Pool, ctx: FrontContext) -> None:
        config = ctx.config
        self.models = Models(pool)
        self.metrics = PoolMetrics(pool, ctx.http)
        posts = Endpoints(pool, self.models, config.max_body_bytes)
        self.batches = BatchService(
            Path(config.jobs_dir).expanduser() if config.jobs_dir else data_dir() / "jobs",
            LineExecutor(posts),
            concurrency=config.batch_concurrency or _CONCURRENCY,
            max_lines=config.max_batch_lines,
            max_line_bytes=config.max_body_bytes,
        )
        self._pool = pool
        self._config = config
        self._overview = Overview(pool, self.models, self.metrics, ctx)
        self._pages = ("/docs", "/redoc") if config.enable_docs else ()
        self._batch_app = _batch_app(config, self.batches)
        self._socket = StreamSocket(ctx, posts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = plain_path(scope)
        if scope["type"] == "websocket":
            if path == "/v1/stream":
                await self._socket(WebSocket(scope, receive, send))
            else:
                await send({"type": "websocket.close", "code": 1000})
            return
        with contextlib.suppress(ClientGoneError, ClientDisconnect):
            await self._answer(path, scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        own = self._overview.find(path, request)
        if own is not None:
            scope["route"] = _Handler(own[0])
            await (await own[1](request))(scope, receive, send)
        elif path in self._pages or any(path == one or path.startswith(f"{one}/") for one in _BATCHES):
            await self._batch_app(scope, receive, send)
        elif path.startswith(_RESPONSES) and path != _COUNT:
            await self._stored_response(request, send)
        else:
            await self._forward(path, request, send)

    async def _forward(self, path: str, request: Request, send: Send) -> None:
        """Forward a request to the model that it names."""
        if path in _SLEEP:
            text = f"{path} is not for a server of several models, which puts them to sleep and wakes them itself."
            raise ApiError(400, f"{text} See --model-eviction and --model-idle-timeout.")
        config = self._config
        if request.method == "GET":
            body = Body(query_model(request))
            if body.model is None and len(self.models.members) > 1:
                raise _no_route(path)
        else:
            form = max(config.max_body_bytes, config.max_file_bytes) + _AROUND
            body = await named_body(request, config.max_body_bytes, form)
        try:
            member = await self.models.find(body.model)
            request.scope["route"] = _Handler(FORWARDED)
            receive = request.receive
            async with leased(self._pool, member, receive) as lease:
                await relay(member, lease, request.scope, body.receive(receive), send)
        finally:
            body.close()

    async def _stored_response(self, request: Request, send: Send) -> None:
        """Ask the processes that run, also those that sleep, for a response: one of them has made it."""
        request.scope["route"] = _Handler(FORWARDED)
        data = await request.body()
        for member in running(self.models.members):
            again = Request(request.scope, Body(None, data).receive(request.receive))
            if await first_answer(member, again, send):
                return
        response_id = plain_path(request.scope)[len(_RESPONSES) :].partition("/")[0]
        raise ApiError(
            404,
            f"There is no response `{response_id[:100]}`: it was not stored, was deleted, or its model was unloaded "
            "since, which forgets them.",
            param="response_id",
        )


def front_app(front: Front, ctx: FrontContext) -> ASGIApp:
    """Return the application, with its door and the user's middleware."""
    layers = [*reversed(load_middleware(ctx.config.middleware)), *cors_middleware(ctx.config)]
    app: ASGIApp = Door(front, ctx=ctx)
    for layer in reversed(layers):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def _batch_app(config: ServerConfig, batches: BatchService) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(batch_routes(config, batches))
    app.include_router(docs_routes())
    errors.install(app, error_response)
    return app


def _no_route(path: str) -> ApiError:
    return ApiError(
        404,
        f"There is no GET {path} here. If it is a route of one model, name that as {path}?model=NAME; /v1/models lists "
        "them.",
    )
