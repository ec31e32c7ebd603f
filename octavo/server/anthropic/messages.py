"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.output import CompletionOutput, RequestOutput
from octavo.server.anthropic.errors import error_event
from octavo.server.anthropic.events import PING, SIGNATURE, ContentBlocks
from octavo.server.anthropic.protocol import CountBody, MessagesBody, as_chat, own_names
from octavo.server.body import parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.chat import Chat, count_chat, prepare_chat
from octavo.server.openai.generation import check_not_aborted, run
from octavo.server.openai.routing import AccumulatedMessage
from octavo.server.openai.unsupported import check_extras
from octavo.server.origins import in_names
from octavo.server.stream import EventStream, named_event, until_disconnect

_STOPS = {"length": "max_tokens", "repetition": "max_tokens", "tool_calls": "tool_use"}
"""OpenAI's finish reason -> Anthropic's, which has none for an answer cut because of repetition."""


async def messages(ctx: ServerContext, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    body = await parse_body(request, MessagesBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    answer = _MessageEnvelope(f"msg_{request.state.request_id}", ctx.model)
    translated = as_chat(body)
    warnings = check_extras(ctx, translated, chat=True)
    with in_names(partial(own_names, body)):
        chat = await prepare_chat(ctx, translated, answer.id)
    if body.stream:
        return EventStream(
            _stream(ctx, chat, answer, warnings),
            closing=b"",
            on_error=error_event,
            keep_alive_s=ctx.config.sse_keep_alive_s,
            keep_alive=PING,
        )
    whole = await until_disconnect(request.receive, _whole(ctx, chat, answer))
    return json_response(whole | ({"warnings": warnings} if warnings else {}))


async def count_tokens(ctx: ServerContext, request: Request) -> Response:
    """Count a conversation's tokens."""
    body = await parse_body(request, CountBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_model(body.model)
    with in_names(partial(own_names, body)):
        count = await count_chat(ctx, as_chat(body))
    return json_response({"input_tokens": count})


@dataclass(slots=True, frozen=True)
class _MessageEnvelope:
    """Common data of all parts of one answer."""

    id: str
    model: str

    def message(self, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return head | stop | {"usage": usage}


async def _whole(ctx: ServerContext, chat: Chat, answer: _MessageEnvelope) -> dict[str, Any]:
    (routed,) = chat.choices()
    message, told, tokens = AccumulatedMessage(), _AnswerEnd(), 0
    async with aclosing(run(ctx, [chat.job])) as outputs:
        async for _, output in outputs:
            (choice,) = output.outputs
            news = routed.take(choice)
            message.add(news)
            tokens += len(choice.token_ids)
            told.note(output, choice, news.finish)
    usage = _usage(chat, told.cached, tokens)
    stop = told.stop(calls=bool(message.calls) and not routed.cut)
    return answer.message(_content(message), stop, usage) | told.extra


async def _stream(
    ctx: ServerContext, chat: Chat, answer: _MessageEnvelope, warnings: list[str]
) -> AsyncGenerator[bytes, None]:
    (routed,) = chat.choices()
    blocks, told, tokens = ContentBlocks(), _AnswerEnd(), 0
    async with aclosing(run(ctx, [chat.job])) as outputs:
        async for _, output in outputs:
            (choice,) = output.outputs
            first = not told.seen
            news = routed.take(choice)
            told.note(output, choice, news.finish)
            tokens += len(choice.token_ids)
            events = [_start(answer, chat, told)] if first else []
            events += blocks.take(news)
            if events:
                yield b"".join(events)
    end = {
        "type": "message_delta",
        "delta": told.stop(calls=blocks.calls and not routed.cut),
        "usage": _usage(chat, told.cached, tokens),
        **told.extra,
    } | ({"warnings": warnings} if warnings else {})
    yield b"".join(
        [*blocks.close(), named_event("message_delta", end), named_event("message_stop", {"type": "message_stop"})]
    )


def _start(answer: _MessageEnvelope, chat: Chat, told: _AnswerEnd) -> bytes:
    opening = answer.message([], {"stop_reason": None, "stop_sequence": None}, _usage(chat, told.cached, 0))
    return named_event("message_start", {"type": "message_start", "message": opening})


class _AnswerEnd:
    """The engine's outputs that describe the end of the answer."""

    def __init__(self) -> None:
        self.seen = False
        self.cached = 0
        self.extra: dict[str, Any] = {}
        self._finish: str | None = None
        self._reason: int | str | None = None

    def note(self, output: RequestOutput, choice: CompletionOutput, finish: str | None) -> None:
        """
        Raises:
            ApiError: the engine aborted the answer, for which Anthropic has no stop reason.
        """
        check_not_aborted(output)
        self.seen = True
        self.cached = max(self.cached, output.num_cached_tokens)
        self._finish = finish or self._finish
        self._reason = choice.stop_reason
        self.extra |= choice.extra or {}

    def stop(self, *, calls: bool) -> dict[str, Any]:
        if self._finish == "stop" and isinstance(self._reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._reason}
        reason = "tool_use" if calls and self._finish == "stop" else _STOPS.get(self._finish or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(chat: Chat, cached: int, tokens: int) -> dict[str, int]:
    """Return usage; Anthropic counts tokens read from the cache separately."""
    return {
        "input_tokens": len(chat.job.prompt_tokens) - cached,
        "output_tokens": tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _content(message: AccumulatedMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not (message.calls or message.reasoning):
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        function = call.function
        blocks.append({"type": "tool_use", "id": call.id, "name": function.name, "input": _input(function.arguments)})
    return blocks


def _input(arguments: str) -> Any:
    """Return the arguments as an object; {} if the call was cut short."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
