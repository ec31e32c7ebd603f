"""Errors in the form of the client's API."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from octavo.server.anthropic import errors as anthropic
from octavo.server.errors import ApiError
from octavo.server.ollama import errors as ollama
from octavo.server.stream import error_event


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response for `error` in the client's API: OpenAI's, unless the request is from a client of another."""
    if anthropic.speaks_anthropic(scope):
        body = anthropic.error_body(error)
    elif ollama.speaks_ollama(scope):
        body = ollama.error_body(error)
    else:
        body = error.body()
    return Response(body, error.status, error.headers, media_type="application/json")


def stream_error(scope: Scope, error: ApiError) -> bytes:
    """Return the same for a client that reads a stream, as its next event or line."""
    if anthropic.speaks_anthropic(scope):
        return anthropic.error_event(error)
    return ollama.error_line(error) if ollama.speaks_ollama(scope) else error_event(error)
