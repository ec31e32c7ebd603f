"""POST /start_profile and /stop_profile, available if the server has a folder for profiles."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response


def profile_routes(ctx: ServerContext) -> APIRouter:
    """Return the routes for profiling."""
    router = APIRouter(tags=["development"])
    engine = ctx.frontend.engine

    async def start_profile(request: Request) -> Response:
        """Record every step. `profile_prefix`: prefix of the trace's file name."""
        await engine.start_profile(request.query_params.get("profile_prefix", ""))
        return json_response({"status": "started"})

    async def stop_profile(request: Request) -> Response:
        """End the profile. `trace`: its file on the server's machine; null if no profile was running."""
        return json_response({"status": "stopped", "trace": await engine.stop_profile() or None})

    router.add_api_route("/start_profile", start_profile, methods=["POST"])
    router.add_api_route("/stop_profile", stop_profile, methods=["POST"])
    return router
