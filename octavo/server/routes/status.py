"""The server's state: liveness, readiness, version, metrics, and the home page."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, json_response
from octavo.server.metrics.metrics import CONTENT_TYPE
from octavo.server.routes.home import home_page
from octavo.server.siblings.crew import Crew
from octavo.version import __version__


def status_routes(ctx: ServerContext) -> APIRouter:
    """GET /health, /live, /ready, /ping, /load, /version and /."""
    router = APIRouter(tags=["status"])

    async def health(request: Request) -> Response:
        """200 while the engine is alive and makes progress; 503 with the reason otherwise."""
        return _health(ctx)

    async def ready(request: Request) -> Response:
        """200 while new requests are accepted; 503 if the engine is unhealthy or the server is shutting down."""
        if ctx.lifecycle.draining:
            return ApiError(503, "The server is shutting down and takes no new requests.").response()
        return _health(ctx, "ready")

    async def load(request: Request) -> Response:
        """Return the number of sequences running or waiting."""
        return json_response({"server_load": ctx.admission.load})

    async def version(request: Request) -> Response:
        """Return the server's version."""
        return json_response({"version": __version__})

    async def home(request: Request) -> Response:
        """Show what this server is and how to use it."""
        return home_page(ctx, request)

    for path in ("/health", "/live"):
        router.add_api_route(path, health, methods=["GET"], name=path[1:])
    router.add_api_route("/ping", health, methods=["GET", "POST"], name="ping", include_in_schema=False)
    router.add_api_route("/ready", ready, methods=["GET"])
    router.add_api_route("/load", load, methods=["GET"])
    router.add_api_route("/version", version, methods=["GET"])
    router.add_api_route("/", home, methods=["GET"], include_in_schema=False)
    return router


def metrics_routes(ctx: ServerContext, crew: Crew | None) -> APIRouter:
    """GET /metrics.

    Args:
        crew: source of the other processes' metrics.
    """
    router = APIRouter(tags=["status"])

    async def metrics(request: Request) -> Response:
        """Return all metrics, for Prometheus."""
        others = await crew.metrics() if crew is not None else ()
        if ctx.metrics.gpus is not None:
            await ctx.metrics.gpus.refresh()
        return Response(ctx.metrics.exposition(others), media_type=CONTENT_TYPE)

    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response)
    return router


def _health(ctx: ServerContext, word: str = "ok") -> Response:
    health = ctx.frontend.engine.health()
    if health.ok:
        return json_response({"status": word})
    return ApiError(503, health.reason or "The engine is not healthy.").response()
