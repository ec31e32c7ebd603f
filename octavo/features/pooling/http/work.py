"""Serve an HTTP request: prepare its inputs, reserve queue places, compute them together, and release."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.core.request import GenerateRequest
from octavo.features.pooling.http.answers import VectorUsage
from octavo.features.pooling.http.protocol import InputBody, VectorBody
from octavo.features.pooling.params import Pooled, PooledOutput, PoolingSpec
from octavo.features.pooling.payload import NAME
from octavo.features.pooling.requests import Pair, PoolingAbortedError, PoolingFailedError, PoolingPreparer, pool
from octavo.features.pooling.text import PoolingText
from octavo.server.body import check_count, require
from octavo.server.context import ServerContext, answer_id, engine_id
from octavo.server.errors import ApiError
from octavo.server.extras import LEAVE_OUT, Limited, check_undeclared
from octavo.server.listing import Listing
from octavo.server.merge import merge
from octavo.server.openai.messages import render
from octavo.server.openai.protocol import Message
from octavo.server.stream import until_disconnect
from octavo.text.aside import aside
from octavo.text.prompts.prompt import Prompt

T = TypeVar("T")

_LIMITED: dict[str, Limited] = {
    "embed_dtype": (LEAVE_OUT, (None, "float32")),
    "endianness": (LEAVE_OUT, (None, "native", "little")),
    "messages": (LEAVE_OUT, (None,)),
    "chat_template": (LEAVE_OUT, (None,)),
    "chat_template_kwargs": (LEAVE_OUT, (None, {})),
    "instruction": (LEAVE_OUT, (None, "")),
    "padding": ("inputs are never padded. Leave it out", (None, False, True, "longest", "do_not_pad")),
    "rank_fields": (LEAVE_OUT, (None, [])),
    "softmax": (LEAVE_OUT, (None,)),
}


@dataclass(frozen=True, slots=True)
class PoolingReply:
    """Common fields of an answer."""

    id: str
    created: int
    model: str
    warnings: list[str] | UnsetType

    @classmethod
    def of(cls, ctx: ServerContext, request: Request, body: VectorBody, prefix: str) -> PoolingReply:
        """Create the reply; check that the body has no unsupported field. `ctx` is the one for the body's model."""
        warnings = check_undeclared(body, strict=ctx.config.strict_params, known=_LIMITED)
        return cls(
            id=answer_id(request, body.request_id, prefix),
            created=int(time.time()),
            model=ctx.model,
            warnings=warnings or UNSET,
        )

    def listing(self, items: list[T], jobs: Sequence[GenerateRequest]) -> Listing[T, VectorUsage]:
        """Return an answer with an item for each input."""
        return Listing(
            id=self.id,
            created=self.created,
            model=self.model,
            data=items,
            usage=usage_of(jobs),
            warnings=self.warnings,
        )


def preparer_of(ctx: ServerContext) -> PoolingPreparer:
    """Return the preparer of the server's front end."""
    hook = ctx.frontend.preparer.hook(NAME)
    assert isinstance(hook, PoolingText)
    return hook.preparer


def preparation(ctx: ServerContext, body: VectorBody, reply: PoolingReply) -> Callable[..., GenerateRequest]:
    """Return `PoolingPreparer.prepare` with the body's options for all inputs."""

    def prepare(prompt: Prompt | Pair, params: PoolingSpec, *, param: str = "input") -> GenerateRequest:
        return preparer_of(ctx).prepare(
            prompt,
            params,
            request_id=engine_id(reply.id),
            priority=ctx.priority(body.priority),
            tenant=ctx.tenant,
            namespace=body.cache_salt or "",
            add_special_tokens=body.add_special_tokens is not False,
            truncate=body.truncate_prompt_tokens,
            side=body.truncation_side or "right",
            param=param,
            options=ctx.options,
            prompted=param != "messages",
        )

    return prepare


async def prepare_inputs(
    ctx: ServerContext, body: InputBody, reply: PoolingReply, params: PoolingSpec
) -> list[GenerateRequest]:
    """Return a request for each input, or for the conversation; errors give an input's index if there are several."""
    given = (body.input is None) + (body.messages is None) == 1
    require(given, "input" if body.messages is None else "messages", None, "Give one of input and messages.")
    if body.messages is not None:
        return [await _prepare_messages(ctx, body, reply, body.messages, params)]
    inputs: list[Any] = body.input or []
    check_count(ctx.config.max_inputs, len(inputs), "input")
    prepare = preparation(ctx, body, reply)

    def work() -> list[GenerateRequest]:
        made = []
        for number, one in enumerate(inputs):
            try:
                made.append(prepare(one, params))
            except InvalidRequestError as exc:
                if len(inputs) > 1 and exc.param in (None, "input"):
                    raise InvalidRequestError(exc.message, param=f"input.{number}", value=exc.value) from None
                raise
        return made

    return await in_thread_if_long(inputs, work)


async def _prepare_messages(
    ctx: ServerContext, body: InputBody, reply: PoolingReply, messages: Sequence[Message], params: PoolingSpec
) -> GenerateRequest:
    """Return a request for a rendered conversation, which contains its special tokens already."""
    if ctx.frontend.chat is None and body.chat_template is None:
        raise InvalidRequestError(
            "This model has no chat template, so messages can't be made into a prompt. Send input, or start the server "
            "with --chat-template FILE.",
            param="messages",
        )
    text = await render(
        ctx,
        messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        options=ctx.config.default_chat_template_kwargs | (body.chat_template_kwargs or {}),
        template=body.chat_template,
    )
    prepare = preparation(ctx, body.model_copy(update={"add_special_tokens": bool(body.add_special_tokens)}), reply)
    return await in_thread_if_long([text], lambda: prepare(text, params, param="messages"))


async def in_thread_if_long(texts: Sequence[Any], work: Callable[[], T]) -> T:
    """Run `work`, which tokenizes the texts; in a thread if they are long."""
    return await aside(sum(len(text) for text in texts), work)


async def compute(ctx: ServerContext, request: Request, jobs: Sequence[GenerateRequest]) -> list[Pooled]:
    """Return the results in the jobs' order; abort all if the client disconnects or one fails."""
    done: dict[int, Pooled] = {}

    async def collect() -> list[Pooled]:
        async with aclosing(merge([_tracked(ctx, job) for job in jobs])) as outputs:
            async for number, output in outputs:
                done[number] = output.pooled
        return [done[number] for number in range(len(jobs))]

    return await until_disconnect(request.receive, collect())


def usage_of(jobs: Sequence[GenerateRequest]) -> VectorUsage:
    total = sum(len(job.tokens) for job in jobs)
    return VectorUsage(total, total)


async def _tracked(ctx: ServerContext, job: GenerateRequest) -> AsyncGenerator[PooledOutput, None]:
    with ctx.in_flight(job) as record:
        try:
            output = await pool(ctx.frontend.engine, job)
        except PoolingFailedError as exc:
            raise ApiError(503 if isinstance(exc, PoolingAbortedError) else 500, str(exc)) from exc
        record.observe_whole(output.times, cached=output.num_cached_tokens, preemptions=output.num_preemptions)
        yield output
