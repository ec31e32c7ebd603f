"""POST /collective_rpc: calls one of a closed list of methods by name."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import decode_json, read_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.rpc import CoreCalls, bound


def rpc_routes(ctx: ServerContext) -> APIRouter:
    """POST /collective_rpc."""
    router = APIRouter(tags=["development"])
    calls = CoreCalls(ctx.frontend.engine)

    async def collective_rpc(request: Request) -> Response:
        """Call `method` with `args` and `kwargs`; `results` has the result of the one worker."""
        body = decode_json(await read_body(request, ctx.config.max_body_bytes))
        method, args, kwargs = body.get("method"), body.get("args") or [], body.get("kwargs") or {}
        require(isinstance(method, str), "method", method, "method is required, and must be a string.")
        require(isinstance(args, list), "args", args, "args must be a list.")
        require(isinstance(kwargs, dict), "kwargs", kwargs, "kwargs must be an object.")
        return json_response({"results": [await bound(calls, str(method), args, kwargs)]})

    router.add_api_route("/collective_rpc", collective_rpc, methods=["POST"])
    return router
