"""The server's current requests, for debugging."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.metrics.requests import RequestRecord


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An active request. Times are in seconds; tokens are those of all choices.

    Attributes:
        state: "first token" until that has arrived: the request is queued, or its prompt is computed.
        since_last_token: None before the first token.
        tenant: whose share of the engine it takes; "" for requests that name none.
        waits_for: what a feature makes it wait for, such as an adapter; "" for nothing.
    """

    id: str
    state: str
    age: float
    prompt_tokens: int
    generated_tokens: int
    since_last_token: float | None
    max_tokens: int | None
    n: int
    priority: int
    tenant: str
    waits_for: str


def debug_routes(ctx: ServerContext) -> APIRouter:
    """GET /debug/requests."""
    router = APIRouter(tags=["status"])

    async def requests(request: Request) -> Response:
        """Return the requests of this process, oldest first, and the engine's state."""
        now = time.monotonic()
        stats, health = ctx.frontend.engine.stats(), ctx.frontend.engine.health()
        oldest_first = sorted(ctx.metrics.requests.live, key=lambda record: record.arrival)
        return json_response(
            {
                "engine": {
                    "healthy": health.ok,
                    "reason": health.reason,
                    "paused": stats.paused,
                    "running": stats.num_running,
                    "waiting": stats.num_waiting,
                    "waits_for": stats.waits_for,
                    "kv_cache_usage": round(stats.kv_usage, 4),
                    "preemptions": stats.num_preemptions,
                    "last_step_seconds": round(stats.last_step_s, 4),
                },
                "requests": [_live(ctx, record, now, stats.waits) for record in oldest_first],
            }
        )

    router.add_api_route("/debug/requests", requests, methods=["GET"])
    return router


def _live(ctx: ServerContext, record: RequestRecord, now: float, waits: Mapping[str, str]) -> LiveRequest:
    request = record.request
    received = ctx.frontend.engine.received(request.id)
    return LiveRequest(
        id=request.id,
        state="generating" if received.tokens else "first token",
        age=round(now - record.arrival, 3),
        prompt_tokens=len(request.tokens),
        generated_tokens=received.tokens,
        since_last_token=None if received.at is None else round(now - received.at, 3),
        max_tokens=request.params.max_tokens,
        n=request.params.n,
        priority=request.priority,
        tenant=request.tenant,
        waits_for=waits.get(request.id, ""),
    )
