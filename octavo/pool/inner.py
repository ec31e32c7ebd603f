"""Requests that do not arrive by HTTP: lines of batches, and messages on a WebSocket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from octavo.pool.models import Models
from octavo.pool.naming import Body, named_body
from octavo.pool.pool import Pool, lost
from octavo.server.errors import ApiError
from octavo.server.routes.endpoints import Endpoint
from octavo.server.siblings.link import forwarded
from octavo.server.stream import EventStream

POSTS = (
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/decisions", "/v1/embeddings", "/v2/embed", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"),
    *("/classify", "/pooling", "/tokenize", "/detokenize", "/inference/v1/generate", "/generative_scoring"),
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
)
"""Routes that such requests may name. Which of them a model has, its process says."""
_DONE = b"[DONE]"
_DATA, _EVENT = b"data:", b"event:"
_END = b"\n\n"


class Endpoints(Mapping[str, Endpoint]):
    """Path -> handler of a POST, which forwards it to the model's process."""

    def __init__(self, pool: Pool, models: Models, max_body_bytes: int) -> None:
        self._pool = pool
        self._models = models
        self._max_body_bytes = max_body_bytes

    def __getitem__(self, path: str) -> Endpoint:
        if path not in POSTS:
            raise KeyError(path)
        return self._forward

    def __iter__(self) -> Iterator[str]:
        return iter(POSTS)

    def __len__(self) -> int:
        return len(POSTS)

    async def _forward(self, request: Request) -> Response:
        body = await named_body(request, self._max_body_bytes, self._max_body_bytes)
        answer = self._answer(request, body)
        start = await anext(answer)
        assert isinstance(start, _Start)
        if start.streams:
            return EventStream(_events(answer))
        parts = [part async for part in answer if isinstance(part, bytes)]
        response = Response(b"".join(parts), start.status, {"Content-Type": "application/json"})
        if start.status >= 400:
            raise _error(bytes(response.body), start.status)
        return response

    async def _answer(self, request: Request, body: Body) -> AsyncGenerator[_Start | bytes, None]:
        """Yield the response's beginning, then its body in pieces. Closing this cancels the request."""
        member = await self._models.find(body.model)
        lease = await self._pool.acquire(member)
        try:
            receive = body.receive(request.receive)
            async with forwarded(lease.child.requests, request.scope, receive) as messages:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        kind = Headers(raw=message["headers"]).get("content-type", "")
                        yield _Start(message["status"], kind.startswith("text/event-stream"))
                    else:
                        yield message["body"]
        except ConnectionError:
            await lease.child.ending()
            raise lost(member) from None
        finally:
            lease.release()


class _Start(msgspec.Struct, frozen=True):
    status: int
    streams: bool


async def _events(pieces: AsyncGenerator[_Start | bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield whole server-sent events. Raise ApiError for one that reports an error."""
    rest = b""
    try:
        async for piece in pieces:
            assert isinstance(piece, bytes)
            *events, rest = (rest + piece).split(_END)
            for event in events:
                lines = event.split(b"\n")
                data = next((line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)), None)
                if data is None or data == _DONE:
                    continue
                if data.startswith(b'{"error":') or b"event: error" in lines:
                    raise _error(data, 500)
                yield event + _END
    finally:
        await pieces.aclose()


def _error(body: bytes, status: int) -> ApiError:
    """Return the error that a process has answered with, in OpenAI's or Anthropic's form."""
    try:
        told = msgspec.json.decode(body)["error"]
        return ApiError(int(told.get("code") or status), str(told["message"]), param=told.get("param"))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return ApiError(status, body.decode(errors="replace") or "The model's process has failed.")
