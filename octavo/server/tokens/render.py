"""Requests as sent to the engine, without computing them: `/v1/chat/completions/render` and similar."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.anthropic.protocol import MessagesBody
from octavo.server.anthropic.protocol import as_chat as chat_of_messages
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.chat import prepare_chat
from octavo.server.openai.completions import prepare_completion
from octavo.server.openai.generation import GenerationJob
from octavo.server.openai.protocol import ChatBody, CompletionBody, GenerationBody
from octavo.server.openai.reply import Reply
from octavo.server.openai.sampling import completion_params
from octavo.server.openai.unsupported import check_extras
from octavo.server.tokens.protocol import Rendered

Offsets = list[tuple[int, int]]
_INSIDE = ("output_kind", "bad_token_ids")
"""Fields of `SamplingParams` for internal use."""


async def render_chat(ctx: ServerContext, request: Request) -> Response:
    """Render a chat completion."""
    body = await parse_body(request, ChatBody, ctx.config.max_body_bytes)
    return json_response(await _chat(ctx, request, body))


async def render_messages(ctx: ServerContext, request: Request) -> Response:
    """Render a request of Anthropic's API."""
    body = await parse_body(request, MessagesBody, ctx.config.max_body_bytes)
    return json_response(await _chat(ctx, request, chat_of_messages(body)))


async def render_completion(ctx: ServerContext, request: Request) -> Response:
    """Render a text completion, for each of its prompts."""
    body = await parse_body(request, CompletionBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_model(body.model)
    reply = Reply.of(ctx, request, body, "cmpl-", check_extras(ctx, body, chat=False))
    jobs = await prepare_completion(ctx, body, reply, completion_params(ctx, body))
    names = [reply.id] if len(jobs) == 1 else [f"{reply.id}-{number}" for number in range(len(jobs))]
    special = body.add_special_tokens is not False
    offsets = [_offsets(ctx, job, body, special=special) for job in jobs]
    parts = zip(jobs, names, offsets, strict=True)
    return json_response([_rendered(job, body, name, reply.model, where) for job, name, where in parts])


async def _chat(ctx: ServerContext, request: Request, body: ChatBody) -> Rendered:
    ctx = await ctx.for_model(body.model)
    reply = Reply.of(ctx, request, body, "chatcmpl-", check_extras(ctx, body, chat=True))
    chat = await prepare_chat(ctx, body, reply.id)
    offsets = _offsets(ctx, chat.job, body, special=bool(body.add_special_tokens))
    return _rendered(chat.job, body, reply.id, reply.model, offsets)


def _offsets(ctx: ServerContext, job: GenerationJob, body: GenerationBody, *, special: bool) -> Offsets | None:
    """Return token offsets, or None.

    There are none if not requested, if the prompt was given as tokens, or if a special token precedes truncated text.
    """
    if not body.return_token_offsets or job.text is None:
        return None
    ids, offsets = ctx.frontend.tokenizer.encode_with_offsets(job.text, add_special_tokens=special)
    kept = len(job.prompt_tokens)
    for first in (0, len(ids) - kept):
        if ids[first : first + kept] == job.prompt_tokens:
            return offsets[first : first + kept]
    return None


def _rendered(job: GenerationJob, body: GenerationBody, name: str, model: str, offsets: Offsets | None) -> Rendered:
    text = "Only token ids can be rendered, and prompt embeds have none; leave them out."
    require(not job.request.keys, "prompt_embeds", None, text)
    limit = job.request.params.max_tokens
    params: dict[str, Any] = msgspec.to_builtins(job.params) | {"max_tokens": limit}
    for field in _INSIDE:
        params.pop(field, None)
    params.get("structured_outputs", {}).pop("param", None)
    options = body.stream_options
    return Rendered(
        request_id=name,
        token_ids=job.prompt_tokens,
        sampling_params=params,
        model=model,
        stream=body.streamed,
        stream_options=None if options is None else options.model_dump(exclude_none=True),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        token_offsets=offsets,
    )
