"""`POST /invocations`: one route for all, for container hosts such as SageMaker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from octavo.core.errors import InvalidRequestError
from octavo.server.body import decode_json, read_body
from octavo.server.context import ServerContext
from octavo.server.routes.endpoints import Endpoint
from octavo.server.schema.document import STREAM

Form = tuple[tuple[str, ...], str]
"""Fields that a body has, and the path of the route that reads them."""

_GENERATES: Sequence[Form] = ((("messages",), "/v1/chat/completions"), (("prompt",), "/v1/completions"))


def invocation_routes(
    ctx: ServerContext, posts: Mapping[str, Endpoint], others: Callable[[], Sequence[Form]]
) -> APIRouter:
    """Return POST /invocations, handled by the route whose fields the body has.

    Args:
        posts: path -> handler.
        others: returns the forms of a model that generates no text, the first that fits first.
    """
    router = APIRouter(tags=["openai"])

    async def invoke(request: Request) -> Response:
        """Answer by the route that the body's fields belong to."""
        data = await read_body(request, ctx.config.max_body_bytes)
        forms = _GENERATES if "generate" in ctx.frontend.info.tasks else others()
        return await posts[_path(forms, posts, decode_json(data))](_again(request, data))

    router.add_api_route("/invocations", invoke, methods=["POST"], openapi_extra=_ANY)
    return router


_ANY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
} | STREAM


def _path(forms: Sequence[Form], posts: Mapping[str, Endpoint], body: Mapping[str, Any]) -> str:
    """Return the path of the route that the fields belong to.

    Raises:
        InvalidRequestError: this model supports no operation that fits the body.
    """
    known = [(fields, path) for fields, path in forms if path in posts]
    for fields, path in known:
        if all(field in body for field in fields):
            return path
    wanted = ", ".join(" and ".join(fields) for fields, _ in known)
    raise InvalidRequestError(f"The body matches no request that this model answers; give one of: {wanted}.")


def _again(request: Request, data: bytes) -> Request:
    """Return the request with its body unread."""
    parts: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else await request.receive()

    return Request(request.scope, receive)
