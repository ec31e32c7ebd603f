"""Errors in the form of Anthropic's API, for its clients.

Reference: https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from octavo.server.errors import ApiError

REQUEST_ID = "request-id"
"""The header in which Anthropic's clients expect the request id."""
_VERSION = "anthropic-version"
_PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is from an Anthropic client: by the header that they all send, or by the route."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == _PATH or path.startswith(_PATH + "/") or _VERSION in Headers(scope=scope)


def error_body(error: ApiError) -> bytes:
    """Return the JSON of an error; `param` and `code` are Octavo's additions."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": error.message, "param": error.param, "code": error.status}
    return msgspec.json.encode({"type": "error", "error": told})


def error_event(error: ApiError) -> bytes:
    """Return the event for an error after the stream has begun."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
