"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.output import CompletionOutput, RequestOutput
from octavo.core.params import SamplingParams
from octavo.server.body import parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.generation import Job, UsageCounter, collect, prepare, run
from octavo.server.openai.logprobs import LogprobWriter
from octavo.server.openai.messages import render
from octavo.server.openai.protocol import ChatBody
from octavo.server.openai.reply import Reply
from octavo.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
)
from octavo.server.openai.sampling import chat_params
from octavo.server.openai.unsupported import check_extras
from octavo.server.stream import EventStream, event, until_disconnect


async def chat_completions(ctx: ServerContext, request: Request) -> Response:
    """Answer one conversation, streamed or whole."""
    body = await parse_body(request, ChatBody, ctx.config.max_body_bytes)
    reply = Reply.of(ctx, request, body, "chatcmpl-", check_extras(body, chat=True))
    params = chat_params(ctx, body)
    job = await _prepare(ctx, body, reply, params)
    writer = LogprobWriter(ctx.frontend.tokenizer, params.logprobs or 0, as_ids=bool(body.return_tokens_as_token_ids))
    if body.streamed:
        return EventStream(_stream(ctx, job, reply, writer))
    outputs = await until_disconnect(request.receive, collect(ctx, [job]))
    return json_response(_whole(job, outputs[0], reply, writer))


async def _prepare(ctx: ServerContext, body: ChatBody, reply: Reply, params: SamplingParams) -> Job:
    text = await render(
        ctx,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        options=body.chat_template_kwargs,
        template=body.chat_template,
    )
    # The template has written the special tokens.
    special = bool(body.add_special_tokens)
    try:
        return await prepare(ctx, text, params, body, reply.id, add_special_tokens=special, param="messages")
    except InvalidRequestError as exc:
        if exc.param == "max_tokens" and body.max_completion_tokens is not None:
            raise InvalidRequestError(exc.message, param="max_completion_tokens", value=exc.value) from None
        raise


def _whole(job: Job, output: RequestOutput, reply: Reply, writer: LogprobWriter) -> ChatCompletion:
    counter = UsageCounter([job])
    counter.add(0, output)
    return ChatCompletion(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=[
            ChatChoice(
                choice.index,
                ChatMessage("assistant", choice.text),
                writer.chat(choice),
                choice.finish_reason,
                choice.stop_reason,
                choice.token_ids if reply.return_token_ids else UNSET,
            )
            for choice in output.outputs
        ],
        usage=counter.usage(),
        prompt_token_ids=job.prompt_tokens if reply.return_token_ids else UNSET,
        warnings=reply.warnings,
    )


async def _stream(ctx: ServerContext, job: Job, reply: Reply, writer: LogprobWriter) -> AsyncGenerator[bytes, None]:
    counter = UsageCounter([job])
    choices = job.request.params.n
    finished = 0
    opening = _opening(reply, counter, job)
    async with aclosing(run(ctx, [job])) as outputs:
        async for number, output in outputs:
            counter.add(number, output)
            events, opening = opening, []
            for choice in output.outputs:
                finished += choice.finish_reason is not None
                delta = _delta(choice, reply, writer)
                if delta is not None:
                    last = finished == choices and choice is output.outputs[-1]
                    events.append(event(_chunk(reply, counter, delta, last=last)))
            if events:
                yield b"".join(events)
    if reply.include_usage:
        yield event(
            ChatChunk(
                id=reply.id,
                created=reply.created,
                model=reply.model,
                choices=[],
                usage=counter.usage(),
                warnings=reply.warnings,
            )
        )


def _opening(reply: Reply, counter: UsageCounter, job: Job) -> list[bytes]:
    """The chunks that give each choice its role; they travel with the first text."""
    delta = ChatDelta("assistant", "")
    return [
        event(
            ChatChunk(
                id=reply.id,
                created=reply.created,
                model=reply.model,
                choices=[ChatChunkChoice(index, delta)],
                usage=reply.chunk_usage(counter),
                prompt_token_ids=job.prompt_tokens if reply.return_token_ids and index == 0 else UNSET,
            )
        )
        for index in range(job.request.params.n)
    ]


def _delta(choice: CompletionOutput, reply: Reply, writer: LogprobWriter) -> ChatChunkChoice | None:
    """What is new of a choice, or None if it is nothing that a client can see."""
    ends = choice.finish_reason is not None
    ids = choice.token_ids if reply.return_token_ids else UNSET
    logprobs = writer.chat(choice) if choice.logprobs else None
    if not (choice.text or ends or ids or logprobs):
        return None
    return ChatChunkChoice(
        choice.index,
        ChatDelta(content=choice.text) if choice.text or not ends else ChatDelta(),
        logprobs,
        choice.finish_reason,
        choice.stop_reason if ends else UNSET,
        ids,
    )


def _chunk(reply: Reply, counter: UsageCounter, choice: ChatChunkChoice, *, last: bool) -> ChatChunk:
    return ChatChunk(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=[choice],
        usage=reply.chunk_usage(counter),
        warnings=reply.chunk_warnings(last=last),
    )
