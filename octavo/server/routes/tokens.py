"""Routes whose prompts and answers are token ids."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.anthropic.protocol import MessagesBody
from octavo.server.context import ServerContext
from octavo.server.openai.protocol import ChatBody, CompletionBody
from octavo.server.schema.document import describe
from octavo.server.tokens import derender, generate, info, labels, render
from octavo.server.tokens.derender import DerenderChatBody, DerenderCompletionBody
from octavo.server.tokens.labels import LabelsBody
from octavo.server.tokens.protocol import GenerateBody

TOKEN_BODIES: list[type[BaseModel]] = [GenerateBody, LabelsBody, DerenderChatBody, DerenderCompletionBody]


def token_routes(ctx: ServerContext) -> APIRouter:
    """Return /inference/v1/generate, /generative_scoring, /render and /derender."""
    router = APIRouter(tags=["tokens"])

    async def generate_tokens(request: Request) -> Response:
        """Continue a prompt of token ids with token ids."""
        return await generate.generate(ctx, request)

    async def render_chat_completion(request: Request) -> Response:
        """Return the tokens and sampling parameters of a chat completion."""
        return await render.render_chat(ctx, request)

    async def render_completion(request: Request) -> Response:
        """Return the tokens and sampling parameters of each prompt of a text completion."""
        return await render.render_completion(ctx, request)

    async def render_message(request: Request) -> Response:
        """Return the tokens and sampling parameters of a request in Anthropic's API."""
        return await render.render_messages(ctx, request)

    async def derender_chat_completion(request: Request) -> Response:
        """Return the chat completion of given tokens."""
        return await derender.derender_chat(ctx, request)

    async def derender_completion(request: Request) -> Response:
        """Return the text completion of given tokens."""
        return await derender.derender_completion(ctx, request)

    async def score_labels(request: Request) -> Response:
        """Return the probability of a label after a query with each of several items."""
        return await labels.generative_scoring(ctx, request)

    def post(path: str, endpoint: Any, body: Any, *, streams: bool = False) -> None:
        router.add_api_route(path, endpoint, methods=["POST"], openapi_extra=describe(body, streams=streams))

    post("/inference/v1/generate", generate_tokens, GenerateBody, streams=True)
    post("/generative_scoring", score_labels, LabelsBody)
    post("/v1/chat/completions/render", render_chat_completion, ChatBody)
    post("/v1/completions/render", render_completion, CompletionBody)
    post("/v1/messages/render", render_message, MessagesBody)
    post("/v1/chat/completions/derender", derender_chat_completion, DerenderChatBody)
    post("/v1/completions/derender", derender_completion, DerenderCompletionBody)
    return router


def tokenizer_routes(ctx: ServerContext) -> APIRouter:
    """GET /tokenizer_info."""
    router = APIRouter(tags=["tokens"])

    async def tokenizer_info(request: Request) -> Response:
        """Return the tokenizer's special tokens and chat template."""
        return info.tokenizer_info(ctx)

    router.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"])
    return router
