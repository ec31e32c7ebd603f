"""The routes under which the model answers."""

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
from octavo.server.openai.respond.route import Responses
from octavo.server.schema.document import describe
from octavo.server.siblings.siblings import Siblings


def inference_routes(ctx: ServerContext, responses: Responses | None = None) -> APIRouter:
    """POST /v1/chat/completions, /v1/completions, /v1/decisions, /v1/responses (and what belongs to it), /v1/messages,
    /v1/messages/count_tokens, /tokenize, /detokenize; GET /v1/models and /v1/models/{id}.

    Args:
        responses: the Responses API; by default one of its own, with its own memory.
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
        """The model's answer to a conversation, as OpenAI's API has it."""
        return await chat.chat_completions(ctx, request)

    async def create_chat_completions(request: Request) -> Response:
        """The model's answers to several conversations, one choice each."""
        return await chat_batch.chat_completions_batch(ctx, request)

    async def create_completion(request: Request) -> Response:
        """The model's continuation of a text, as OpenAI's API has it."""
        return await completions.completions(ctx, request)

    _post(router, "/v1/chat/completions", create_chat_completion, ChatBody, "openai", streams=True)
    _post(router, "/v1/chat/completions/batch", create_chat_completions, ChatBatchBody, "openai")

    async def create_decision(request: Request) -> Response:
        """Answers to questions about an input, each with its probability, as OpenAI's Decisions API has it."""
        return await decisions(ctx, request)

    _post(router, "/v1/completions", create_completion, CompletionBody, "openai", streams=True)
    _post(router, "/v1/decisions", create_decision, DecisionBody, "openai")


def _add_responses(router: APIRouter, responses: Responses) -> None:
    async def create_response(request: Request) -> Response:
        """The model's response to an input, as OpenAI's Responses API has it."""
        return await responses.create(request)

    async def count_response_tokens(request: Request) -> Response:
        """How many tokens the input of a response has."""
        return await responses.count_tokens(request)

    _post(router, "/v1/responses", create_response, ResponseBody, "openai", streams=True)
    _post(router, "/v1/responses/input_tokens", count_response_tokens, ResponseBody, "openai")


def _add_messages(router: APIRouter, ctx: ServerContext) -> None:
    async def create_message(request: Request) -> Response:
        """The model's answer to a conversation, as Anthropic's API has it."""
        return await anthropic.messages(ctx, request)

    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has, as Anthropic's API has it."""
        return await anthropic.count_tokens(ctx, request)

    _post(router, "/v1/messages", create_message, MessagesBody, "anthropic", streams=True)
    _post(router, "/v1/messages/count_tokens", count_tokens, CountBody, "anthropic")


def _add_tokens(router: APIRouter, ctx: ServerContext) -> None:
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        return await tokens.tokenize(ctx, request)

    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await tokens.detokenize(ctx, request)

    _post(router, "/tokenize", tokenize, TokenizeBody, "tokens")
    _post(router, "/detokenize", detokenize, DetokenizeBody, "tokens")


def _add_models(router: APIRouter, ctx: ServerContext) -> None:
    async def list_models(request: Request) -> Response:
        """The names under which the model is served; for Anthropic's clients in their form."""
        return anthropic_models.list_models(ctx) if speaks_anthropic(request.scope) else models.list_models(ctx)

    async def retrieve_model(request: Request) -> Response:
        """One of them."""
        name = request.path_params["model_id"]
        if speaks_anthropic(request.scope):
            return anthropic_models.retrieve_model(ctx, name)
        return models.retrieve_model(ctx, name)

    router.add_api_route("/v1/models", list_models, methods=["GET"], tags=["openai"])
    # A model's name may hold slashes.
    router.add_api_route("/v1/models/{model_id:path}", retrieve_model, methods=["GET"], tags=["openai"])


def kept_responses(responses: Responses, siblings: Siblings | None) -> APIRouter:
    """GET, DELETE and /cancel of a response that was made before, and its /input_items.

    Args:
        siblings: asked for responses that this process did not make.
    """
    router = APIRouter(tags=["openai"])

    def route(path: str, method: str, name: str, text: str, answer: Callable[[str], Awaitable[Response]]) -> None:
        async def endpoint(request: Request) -> Response:
            wanted = request.path_params["response_id"]
            if siblings is not None and not responses.keeps(wanted):
                url = path.format(response_id=wanted)
                found = await siblings.first(method, url, request.state.request_id)
                if found is not None:
                    return found
            return await answer(wanted)

        router.add_api_route(path, endpoint, methods=[method], name=name, description=text)

    one = "/v1/responses/{response_id}"
    made = "A response that was made before, or is being made in the background."
    route(one, "GET", "retrieve_response", made, responses.retrieve)
    route(one, "DELETE", "delete_response", "Forget a response.", responses.delete)
    ended = "End a response that is being made in the background."
    route(one + "/cancel", "POST", "cancel_response", ended, responses.cancel)
    route(one + "/input_items", "GET", "list_input_items", "What a response answered.", responses.input_items)
    return router
