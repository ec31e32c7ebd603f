"""The routes for inference."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.anthropic import messages as anthropic
from octavo.server.anthropic import models as anthropic_models
from octavo.server.anthropic.errors import speaks_anthropic
from octavo.server.anthropic.protocol import CountBody, MessagesBody
from octavo.server.context import ServerContext
from octavo.server.openai import chat, chat_batch, completions, models, tokens
from octavo.server.openai.decide.protocol import DecisionBody
from octavo.server.openai.decide.route import decisions
from octavo.server.openai.protocol import ChatBatchBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.openai.respond.protocol import ResponseBody
from octavo.server.openai.respond.route import KEPT, Responses
from octavo.server.schema.document import describe
from octavo.server.siblings.siblings import SiblingProcesses


def inference_routes(ctx: ServerContext, responses: Responses | None = None) -> APIRouter:
    """Return the routes of chat completions, completions, decisions, responses, messages, tokenization and models.

    Args:
        responses: the Responses API; by default a new one with its own storage.
    """
    router = APIRouter()
    responses = responses or Responses(ctx)
    _add_completions(router, ctx)
    _add_responses(router, responses)
    router.include_router(kept_responses(responses, ctx.siblings))
    _add_messages(router, ctx)
    _add_tokens(router, ctx)
    _add_models(router, ctx)
    return router


def _post(router: APIRouter, path: str, endpoint: Any, body: Any, tag: str, *, streams: bool = False) -> None:
    said = describe(body, streams=streams)
    router.add_api_route(path, endpoint, methods=["POST"], tags=[tag], openapi_extra=said)


def _add_completions(router: APIRouter, ctx: ServerContext) -> None:
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, as OpenAI's API defines it."""
        return await chat.chat_completions(ctx, request)

    async def create_chat_completions(request: Request) -> Response:
        """Answer several conversations, with one choice each."""
        return await chat_batch.chat_completions_batch(ctx, request)

    async def create_completion(request: Request) -> Response:
        """Continue a text, as OpenAI's API defines it."""
        return await completions.completions(ctx, request)

    _post(router, "/v1/chat/completions", create_chat_completion, ChatBody, "openai", streams=True)
    _post(router, "/v1/chat/completions/batch", create_chat_completions, ChatBatchBody, "openai")

    async def create_decision(request: Request) -> Response:
        """Answer questions about an input, each with its probability, as OpenAI's Decisions API defines it."""
        return await decisions(ctx, request)

    _post(router, "/v1/completions", create_completion, CompletionBody, "openai", streams=True)
    _post(router, "/v1/decisions", create_decision, DecisionBody, "openai")


def _add_responses(router: APIRouter, responses: Responses) -> None:
    async def create_response(request: Request) -> Response:
        """Respond to an input, as OpenAI's Responses API defines it."""
        return await responses.create(request)

    async def count_response_tokens(request: Request) -> Response:
        """Count the tokens of a response's input."""
        return await responses.count_tokens(request)

    _post(router, "/v1/responses", create_response, ResponseBody, "openai", streams=True)
    _post(router, "/v1/responses/input_tokens", count_response_tokens, ResponseBody, "openai")


def _add_messages(router: APIRouter, ctx: ServerContext) -> None:
    async def create_message(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API defines it."""
        return await anthropic.messages(ctx, request)

    async def count_tokens(request: Request) -> Response:
        """Count a conversation's tokens, as Anthropic's API defines it."""
        return await anthropic.count_tokens(ctx, request)

    _post(router, "/v1/messages", create_message, MessagesBody, "anthropic", streams=True)
    _post(router, "/v1/messages/count_tokens", count_tokens, CountBody, "anthropic")


def _add_tokens(router: APIRouter, ctx: ServerContext) -> None:
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        return await tokens.tokenize(ctx, request)

    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await tokens.detokenize(ctx, request)

    _post(router, "/tokenize", tokenize, TokenizeBody, "tokens")
    _post(router, "/detokenize", detokenize, DetokenizeBody, "tokens")


def _add_models(router: APIRouter, ctx: ServerContext) -> None:
    async def list_models(request: Request) -> Response:
        """List the models that requests can name; in Anthropic's form for its clients."""
        if speaks_anthropic(request.scope):
            return await anthropic_models.list_models(ctx)
        return await models.list_models(ctx)

    async def retrieve_model(request: Request) -> Response:
        """Return the card of one model."""
        name = request.path_params["model_id"]
        if speaks_anthropic(request.scope):
            return await anthropic_models.retrieve_model(ctx, name)
        return await models.retrieve_model(ctx, name)

    router.add_api_route("/v1/models", list_models, methods=["GET"], tags=["openai"])
    # A model's name may contain slashes.
    router.add_api_route("/v1/models/{model_id:path}", retrieve_model, methods=["GET"], tags=["openai"])


def kept_responses(responses: Responses, siblings: SiblingProcesses | None) -> APIRouter:
    """Return GET, DELETE and /cancel of a stored response, and its /input_items.

    Args:
        siblings: asked for responses that this process has not created.
    """
    router = APIRouter(tags=["openai"])

    def route(
        path: str, method: str, name: str, text: str, answer: Callable[[Request, str], Awaitable[Response]]
    ) -> None:
        async def endpoint(request: Request) -> Response:
            wanted = request.path_params["response_id"]
            if siblings is not None and not responses.keeps(wanted):
                keeper = await siblings.having(f"{KEPT}/{wanted}", request.state.request_id)
                if keeper is not None:
                    return siblings.relayed(request, keeper)
            return await answer(request, wanted)

        router.add_api_route(path, endpoint, methods=[method], name=name, description=text)

    one = "/v1/responses/{response_id}"
    made = "Return a stored response, complete or in progress, or stream its events."
    route(one, "GET", "retrieve_response", made, responses.retrieve)
    route(one, "DELETE", "delete_response", "Forget a response.", responses.delete)
    ended = "Cancel a background response."
    route(one + "/cancel", "POST", "cancel_response", ended, responses.cancel)
    route(one + "/input_items", "GET", "list_input_items", "List the input items of a response.", responses.input_items)
    return router
