"""Ollama's API, for its clients: requests are passed on to OpenAI's routes, and answers told in Ollama's objects.

Reference: https://docs.ollama.com/api
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.body import parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, as_api_error, json_response
from octavo.server.ollama import models
from octavo.server.ollama.answers import OllamaAnswer, in_message, in_response, merged
from octavo.server.ollama.errors import error_line
from octavo.server.ollama.protocol import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaModelBody,
)
from octavo.server.ollama.translate import chat_of, chat_of_prompt, completion_of, in_own_words
from octavo.server.routes.endpoints import Endpoint, inner_request
from octavo.server.schema.document import describe
from octavo.server.stream import EventStream, until_disconnect

_CHAT, _COMPLETION, _EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_LINES = "application/x-ndjson"
_STREAM = {"description": "A JSON object a line; with `stream` false, one object.", "content": {_LINES: {"schema": {}}}}


def ollama_routes(ctx: ServerContext, endpoints: Mapping[str, Endpoint]) -> APIRouter:
    """Return the routes.

    Args:
        endpoints: path -> handler of OpenAI's routes.
    """
    router, api = APIRouter(tags=["ollama"]), _Ollama(ctx, endpoints)

    def post(path: str, endpoint: Any, body: type[BaseModel], *, streams: bool = False) -> None:
        said = describe(body) | ({"responses": {"200": _STREAM}} if streams else {})
        router.add_api_route(path, endpoint, methods=["POST"], openapi_extra=said)

    def get(path: str, endpoint: Any) -> None:
        router.add_api_route(path, endpoint, methods=["GET"])

    async def chat(request: Request) -> Response:
        """Answer a conversation, as Ollama's API defines it."""
        return await api.chat(request)

    async def generate(request: Request) -> Response:
        """Answer or continue a prompt, as Ollama's API defines it."""
        return await api.generate(request)

    async def embed(request: Request) -> Response:
        """Return a vector of each input, as Ollama's API defines it."""
        return await api.embed(request)

    async def embeddings(request: Request) -> Response:
        """Return a vector of one text, as the older form of Ollama's API defines it."""
        return await api.embeddings(request)

    async def show(request: Request) -> Response:
        """Describe a model."""
        return await models.show(ctx, await api.parsed(request, OllamaModelBody))

    async def pull(request: Request) -> Response:
        """Answer that a served model is there."""
        return await models.pull(ctx, await api.parsed(request, OllamaModelBody))

    async def tags(request: Request) -> Response:
        """List the models that requests can name."""
        return await models.tags(ctx)

    async def running(request: Request) -> Response:
        """List the loaded models."""
        return await models.running(ctx)

    async def version(request: Request) -> Response:
        """Return the version of Ollama's API."""
        return await models.version()

    post("/api/chat", chat, OllamaChatBody, streams=True)
    post("/api/generate", generate, OllamaGenerateBody, streams=True)
    post("/api/embed", embed, OllamaEmbedBody)
    post("/api/embeddings", embeddings, OllamaEmbeddingsBody)
    post("/api/show", show, OllamaModelBody)
    post("/api/pull", pull, OllamaModelBody)
    get("/api/tags", tags)
    get("/api/ps", running)
    get("/api/version", version)
    return router


class _LineStream(EventStream):
    """A stream of JSON objects, a line each."""

    media_type = _LINES


class _Ollama:
    def __init__(self, ctx: ServerContext, endpoints: Mapping[str, Endpoint]) -> None:
        self._ctx = ctx
        self._endpoints = endpoints

    async def chat(self, request: Request) -> Response:
        body = await self.parsed(request, OllamaChatBody)
        name = await models.served_name(self._ctx, body.model)
        answer = OllamaAnswer(body.model, in_message)
        if not body.messages:
            return json_response(answer.loaded())
        self._check_think(body)
        return await self._answer(request, body, _CHAT, chat_of(body, name), answer)

    async def generate(self, request: Request) -> Response:
        body = await self.parsed(request, OllamaGenerateBody)
        name = await models.served_name(self._ctx, body.model)
        answer = OllamaAnswer(body.model, in_response)
        if not (body.prompt or body.images or body.suffix):
            return json_response(answer.loaded())
        _check_prompt(body)
        if body.raw or body.suffix or self._ctx.frontend.chat is None:
            return await self._answer(request, body, _COMPLETION, completion_of(body, name), answer)
        self._check_think(body)
        return await self._answer(request, body, _CHAT, chat_of_prompt(body, name), answer)

    async def embed(self, request: Request) -> Response:
        began = time.monotonic_ns()
        body = await self.parsed(request, OllamaEmbedBody)
        cut = {} if body.truncate is False else {"truncate_prompt_tokens": -1}
        sized = {} if body.dimensions is None else {"dimensions": body.dimensions}
        found = await self._embedded(request, body.model, {"input": body.input, **cut, **sized})
        told = {
            "model": body.model,
            "embeddings": [one["embedding"] for one in found["data"]],
            "total_duration": time.monotonic_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": found["usage"]["prompt_tokens"],
        }
        return json_response(told)

    async def embeddings(self, request: Request) -> Response:
        body = await self.parsed(request, OllamaEmbeddingsBody)
        found = await self._embedded(request, body.model, {"input": body.prompt, "truncate_prompt_tokens": -1})
        return json_response({"embedding": found["data"][0]["embedding"]})

    async def _embedded(self, request: Request, model: str, asked: dict[str, Any]) -> dict[str, Any]:
        asked |= {"model": await models.served_name(self._ctx, model), "encoding_format": "float"}
        work = self._asked(_EMBEDDING, asked, request)
        response = await until_disconnect(request.receive, work)
        found: dict[str, Any] = msgspec.json.decode(response.body)
        return found

    async def parsed(self, request: Request, model: type[Any]) -> Any:
        """Return the body. As in Ollama, its content type does not matter, unless a page sent it: a browser lets pages
        of other sites post forms and plain text anywhere, but JSON only where it is allowed."""
        any_type = "origin" not in request.headers
        return await parse_body(request, model, self._ctx.config.max_body_bytes, any_type=any_type)

    def _check_think(self, body: OllamaGenerationBody) -> None:
        """Refuse to think if the model can't, as Ollama does: clients then ask again without."""
        if body.think and self._ctx.frontend.answers.reasoning is None:
            text = f"{body.model!r} does not support thinking; leave think out."
            raise UnsupportedError(text, param="think", value=body.think)

    async def _answer(
        self, request: Request, body: OllamaGenerationBody, path: str, asked: dict[str, Any], answer: OllamaAnswer
    ) -> Response:
        response = await self._asked(path, asked, request)
        assert isinstance(response, EventStream)
        pieces = _pieces(response, answer)
        if body.streamed:
            return _LineStream(_lines(pieces), closing=b"", on_error=lambda error: error_line(in_own_words(error)))
        return json_response(merged(await until_disconnect(request.receive, _collected(pieces))))

    async def _asked(self, path: str, asked: dict[str, Any], request: Request) -> Response:
        """Return the response of one of OpenAI's routes.

        Raises:
            ApiError: it refuses the request; fields have the names that Ollama's clients know.
        """
        if path not in self._endpoints:
            raise ApiError(404, "This build of Octavo has no embeddings.")
        try:
            inner = inner_request(path, msgspec.json.encode(asked), request.state.request_id, request.state.tenant)
            return await self._endpoints[path](inner)
        except (ApiError, InvalidRequestError) as exc:
            raise in_own_words(as_api_error(exc, request.state.request_id)) from None


def _check_prompt(body: OllamaGenerateBody) -> None:
    for name, instead in (
        ("template", "send messages to /api/chat, or a prompt with raw that has its template already"),
        ("context", "send earlier turns as messages to /api/chat"),
    ):
        if value := getattr(body, name):
            raise UnsupportedError(f"{name} is not supported; {instead}.", param=name, value=value)


async def _pieces(response: EventStream, answer: OllamaAnswer) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(response.payloads()) as payloads:
        async for payload in payloads:
            piece = answer.take(msgspec.json.decode(payload))
            if piece is not None:
                yield piece
    yield answer.end()


async def _lines(pieces: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield msgspec.json.encode(piece) + b"\n"


async def _collected(pieces: AsyncGenerator[dict[str, Any], None]) -> list[dict[str, Any]]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]
