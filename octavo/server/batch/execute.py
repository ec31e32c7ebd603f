"""Runs the lines of a batch through the server's routes, without HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

import msgspec

from octavo.server.batch.lines import Line
from octavo.server.errors import ApiError, as_api_error
from octavo.server.routes.endpoints import Endpoint, inner_request

_RETRIED = frozenset({429, 503})
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 8.0


class _LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    """One line of a batch's output."""

    id: str
    custom_id: str
    response: _LineResponse | None
    error: _Error | None

    @property
    def ok(self) -> bool:
        return self.response is not None and self.response.status_code == 200


def expired(line: Line) -> LineResult:
    """Return the result of a line that was not run in time."""
    error = _Error("batch_expired", "This request could not be executed before the completion window expired.")
    return LineResult(_new_id(), line.custom_id, None, error)


class LineExecutor:
    """Runs lines.

    Args:
        endpoints: path -> handler of a POST to it.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = endpoints

    @property
    def urls(self) -> list[str]:
        return sorted(self._endpoints)

    async def run(self, line: Line) -> LineResult:
        """Return the response to a line, of any status. Retry while the server is full or its engine is down."""
        wait = _FIRST_WAIT_S
        while True:
            request_id = secrets.token_hex(16)
            status, body = await self._ask(line, request_id)
            if status not in _RETRIED:
                return LineResult(_new_id(), line.custom_id, _LineResponse(status, request_id, msgspec.Raw(body)), None)
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    async def _ask(self, line: Line, request_id: str) -> tuple[int, bytes]:
        try:
            _check_whole(line)
            endpoint = self._endpoints.get(line.url)
            if endpoint is None:  # the server was restarted with other settings
                raise ApiError(404, f"This server no longer serves {line.url}.", param="url")
            response = await endpoint(inner_request(line.url, bytes(line.body), request_id, ""))
        except Exception as exc:
            error = as_api_error(exc, request_id)
            return error.status, error.body()
        return response.status_code, bytes(response.body)


def _check_whole(line: Line) -> None:
    """Refuse requests that would not be answered by one complete response."""
    body = msgspec.json.decode(line.body)
    for name in ("stream", "background"):
        if body.get(name):
            raise ApiError(
                400, f"{name} can't be used in a batch, whose answers are not streamed; leave it out.", param=name
            )


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
