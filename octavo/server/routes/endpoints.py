"""The handlers of routes, for requests that do not arrive by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

Endpoint = Callable[[Request], Awaitable[Response]]


def post_endpoints(*routers: APIRouter) -> dict[str, Endpoint]:
    """Return path -> handler of a POST, for paths without parameters."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    posts = [route for route in routes if "POST" in (route.methods or ()) and not route.param_convertors]
    return {route.path: route.endpoint for route in posts}


def inner_request(path: str, body: bytes, request_id: str, tenant: str) -> Request:
    """Return a POST of JSON whose client never disconnects; to abort, cancel the handler's task."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    sent = {"content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
        "client": None,
        "server": None,
        "path_params": {},
        "state": {"request_id": request_id, "tenant": tenant},
    }
    return Request(scope, receive)
