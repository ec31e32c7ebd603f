"""CORS: which other sites' pages may call the server (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from octavo.config import ServerConfig
from octavo.server.errors import ApiError

_REFUSED = "Disallowed CORS "
_ASKED = {
    "origin": ("origin", "--allowed-origins"),
    "method": ("access-control-request-method", "--allowed-methods"),
    "headers": ("access-control-request-headers", "--allowed-headers"),
}
"""What Starlette calls a reason -> the header that asked, and the flag that allows it."""
_LONGEST = 100


class Cors(CORSMiddleware):
    """Starlette's middleware, with a refused preflight as JSON, like all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        reasons = bytes(answer.body).decode().removeprefix(_REFUSED).split(", ")
        texts = [_reason(name, request_headers) for name in reasons]
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        text = f"Pages of other sites may not send this request: {'; '.join(texts)}."
        return ApiError(answer.status_code, text, headers=kept).response()


def cors_middleware(config: ServerConfig) -> list[Middleware]:
    """Return CORS middleware if the settings allow other sites."""
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            Cors,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]


def _reason(name: str, headers: Headers) -> str:
    if name not in _ASKED:
        return f"the server does not support {name}"
    header, flag = _ASKED[name]
    return f"{header}: {headers[header][:_LONGEST]} is not allowed by {flag}"
