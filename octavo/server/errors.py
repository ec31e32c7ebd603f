"""The form of all errors that clients get: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.core.errors import (
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    ModelNotFoundError,
    OctavoError,
    QueueFullError,
    SlowReaderError,
)
from octavo.server.routes.foreign import ROUTES

logger = logging.getLogger("octavo.server")

_MOST_NAMES = 20
"""Most names of models in an error."""

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "TooManyRequestsError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailable",
    507: "InsufficientStorage",
}


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error. `code` is the HTTP status, also if the status line was already sent with 200."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every unsuccessful response, and of an error event in a stream."""

    error: ErrorInfo


class ApiError(OctavoError):
    """An error with its HTTP status. `param` is the dotted name of the offending field, if there is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        kind = _TYPES.get(self.status) or ("BadRequestError" if self.status < 500 else "InternalServerError")
        return msgspec.json.encode(ErrorBody(ErrorInfo(self.message, kind, self.param, self.status)))

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


class UnknownModelError(ApiError):
    """The request names a model that is not served (404)."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        names = ", ".join(f"`{one}`" for one in served[:_MOST_NAMES])
        more = f", and {len(served) - _MOST_NAMES} more that /v1/models lists" if len(served) > _MOST_NAMES else ""
        choice = "that" if len(served) == 1 else "one of them"
        super().__init__(
            404,
            f"The model `{name}` does not exist. This server serves {names}{more}; ask for {choice}.",
            param="model",
        )


def as_api_error(exc: Exception, request_id: str = "") -> ApiError:
    """Convert an exception for the client. Unexpected exceptions are logged, and their details are hidden."""
    match exc:
        case ApiError():
            return exc
        case InvalidRequestError():
            return ApiError(400, str(exc), param=exc.param)
        case ModelNotFoundError():
            return ApiError(404, str(exc), param="model")
        case EngineStateError():
            return ApiError(409, str(exc))
        case QueueFullError():
            return ApiError(429, str(exc), headers={"Retry-After": str(exc.retry_after_s)})
        case SlowReaderError():
            return ApiError(408, str(exc))
        case EngineDeadError():
            return ApiError(503, str(exc))
        case HTTPException():
            return _from_http(exc)
    logger.error("Request %s failed with an unexpected error.", request_id or "-", exc_info=exc)
    return ApiError(
        500,
        "The server failed to answer this request. This is a fault in the server, not in the request; "
        f"its log has the details under request id {request_id or '-'}.",
    )


def _from_http(exc: HTTPException) -> ApiError:
    return ApiError(exc.status_code, str(exc.detail), headers=exc.headers)


def install(app: FastAPI, respond: Callable[[Scope, ApiError], Response]) -> None:
    """Make `app` convert every deliberate error, and its router's own, with `respond`."""

    async def deliberate(request: Request, exc: Exception) -> Response:
        return respond(request.scope, as_api_error(exc, request.state.request_id))

    async def http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return respond(request.scope, _explain_http(request, exc))

    app.add_exception_handler(OctavoError, deliberate)
    app.add_exception_handler(HTTPException, http)


def _explain_http(request: Request, exc: HTTPException) -> ApiError:
    error = _from_http(exc)
    path = request.url.path
    if exc.status_code == 404:
        error.message = f"There is no {request.method} {path} here{_why_missing(request)}"
    elif exc.status_code == 405:
        allowed = error.headers.get("allow") or error.headers.get("Allow") or "another method"
        error.message = f"{path} does not answer {request.method}; it answers {allowed}."
    return error


def _why_missing(request: Request) -> str:
    path = request.url.path
    flag = getattr(request.app.state, "behind", {}).get(path)
    if flag:
        return f" unless the server is started with {flag}."
    reasons = (
        why for route, why in ROUTES.items() if path == route or (route.endswith("/") and path.startswith(route))
    )
    return next((f": {why}." for why in reasons), f"; {_routes_near(request)}")


def _routes_near(request: Request) -> str:
    """Suggest the route that the client may have meant, or where all routes are listed."""
    path, known = request.url.path, sorted(request.app.openapi()["paths"])
    # Usually the client's base URL lacks /v1, or has it twice.
    close = [one for one in (f"/v1{path}", path.removeprefix("/v1")) if one != path and one in known]
    close = close or difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    if close:
        return f"did you mean {close[0]}?"
    if request.app.openapi_url:
        return "/docs shows the routes there are, and /openapi.json lists them for programs."
    return f"this server answers {', '.join(known)}."


def json_response(value: Any) -> Response:
    """Return `value` (msgspec structs, dicts, lists) as a JSON response."""
    return Response(msgspec.json.encode(value), media_type="application/json")
