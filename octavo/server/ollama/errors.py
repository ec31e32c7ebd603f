"""Errors in the form of Ollama's API, for its clients."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from octavo.server.errors import ApiError

_PATH = "/api/"


def speaks_ollama(scope: Scope) -> bool:
    """Return whether a request is from an Ollama client: by the route."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.startswith(_PATH)


def error_body(error: ApiError) -> bytes:
    """Return the JSON of an error; `param` is Octavo's addition."""
    told = {"error": error.message} | ({"param": error.param} if error.param else {})
    return msgspec.json.encode(told)


def error_line(error: ApiError) -> bytes:
    """Return the line for an error after the stream has begun."""
    return error_body(error) + b"\n"
