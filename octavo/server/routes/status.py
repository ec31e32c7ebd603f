"""How the server is: liveness, readiness, version, metrics, and the page that a browser gets."""

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
        """200 while the engine lives and makes progress; 503 with the reason once it does not."""
        return _health(ctx)

    async def ready(request: Request) -> Response:
        """200 while new requests are taken; 503 when the engine is ill or the server is shutting down."""
        if ctx.lifecycle.draining:
            return ApiError(503, "The server is shutting down and takes no new requests.").response()
        return _health(ctx, "ready")

    async def load(request: Request) -> Response:
        """How many sequences are being generated or wait."""
        return json_response({"server_load": ctx.admission.load})

    async def version(request: Request) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def home(request: Request) -> Response:
        """What this is and how to talk to it."""
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
        crew: asked for what the other processes have seen.
    """
    router = APIRouter(tags=["status"])

    async def metrics(request: Request) -> Response:
        """Everything that is measured, for Prometheus."""
        others = await crew.metrics() if crew is not None else ()
        return Response(ctx.metrics.exposition(others), media_type=CONTENT_TYPE)

    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response)
    return router


def _health(ctx: ServerContext, word: str = "ok") -> Response:
    health = ctx.frontend.engine.health()
    if health.ok:
        return json_response({"status": word})
    return ApiError(503, health.reason or "The engine is not healthy.").response()
