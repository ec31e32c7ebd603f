"""Routes to pause the engine and put it to sleep, for trainers that share its machine."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.pausing import AWAKE, PauseMode, pause_mode, sleep_level, wake_tags
from octavo.server.body import decode_json, read_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def pause_routes(ctx: ServerContext) -> APIRouter:
    """POST /pause, /resume, /abort_requests; GET /is_paused."""
    router = APIRouter(tags=["development"])
    engine = ctx.frontend.engine

    async def pause(request: Request) -> Response:
        """Make new requests wait. `mode` determines what happens to running ones: abort, wait or keep."""
        query = request.query_params
        mode = pause_mode(query.get("mode", PauseMode.ABORT), "query.mode")
        if _flag(request, "wait_for_inflight_requests", default=False):
            mode = PauseMode.WAIT
        await engine.pause(mode, clear_cache=_flag(request, "clear_cache", default=True))
        return json_response({"status": "paused"})

    async def resume(request: Request) -> Response:
        """End a pause."""
        await engine.resume()
        return json_response({"status": "resumed"})

    async def is_paused(request: Request) -> Response:
        """Return whether requests wait because of a pause or a sleep."""
        return json_response({"is_paused": engine.stats().paused})

    async def abort_requests(request: Request) -> Response:
        """Abort the requests with these `request_ids`, or all."""
        data = await read_body(request, ctx.config.max_body_bytes)
        names = decode_json(data).get("request_ids") if data.strip() else None
        good = names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
        require(good, "request_ids", names, "request_ids must be a list of strings; leave it out to end all.")
        count = await engine.abort_named(names or None)
        return json_response({"status": "aborted", "aborted": count})

    router.add_api_route("/pause", pause, methods=["POST"])
    router.add_api_route("/resume", resume, methods=["POST"])
    router.add_api_route("/is_paused", is_paused, methods=["GET"])
    router.add_api_route("/abort_requests", abort_requests, methods=["POST"])
    return router


def sleep_routes(ctx: ServerContext) -> APIRouter:
    """POST /sleep, /wake_up; GET /is_sleeping."""
    router = APIRouter(tags=["development"])
    engine = ctx.frontend.engine

    async def is_sleeping(request: Request) -> Response:
        """Return whether memory is released, or nothing is computed until /wake_up."""
        return json_response({"is_sleeping": engine.stats().sleep_level != AWAKE})

    async def sleep(request: Request) -> Response:
        """Pause and release memory. `level`: 0 none; 1 KV cache, and a GPU's weights to the host; 2 both."""
        query = request.query_params
        level = query.get("level", "1")
        require(level.isascii() and level.isdigit(), "query.level", level, "level must be 0, 1 or 2.")
        mode = pause_mode(query.get("mode", PauseMode.ABORT), "query.mode")
        await engine.sleep(sleep_level(int(level), "query.level"), mode)
        return Response(status_code=200)

    async def wake_up(request: Request) -> Response:
        """Allocate memory again: all, or that of `tags` (weights, kv_cache)."""
        await engine.wake_up(wake_tags(request.query_params.getlist("tags"), "query.tags"))
        return Response(status_code=200)

    router.add_api_route("/is_sleeping", is_sleeping, methods=["GET"])
    router.add_api_route("/sleep", sleep, methods=["POST"])
    router.add_api_route("/wake_up", wake_up, methods=["POST"])
    return router


def _flag(request: Request, name: str, *, default: bool) -> bool:
    """Return a boolean of the query."""
    value = request.query_params.get(name)
    if value is None:
        return default
    require(value.lower() in _BOOLEANS, f"query.{name}", value, f"{name} must be true or false.")
    return _BOOLEANS[value.lower()]
