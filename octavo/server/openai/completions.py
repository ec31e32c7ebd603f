"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.output import CompletionOutput, RequestOutput
from octavo.core.params import SamplingParams
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.generation import Job, UsageCounter, collect, prepare, run
from octavo.server.openai.logprobs import LogprobWriter
from octavo.server.openai.protocol import CompletionBody
from octavo.server.openai.reply import Reply
from octavo.server.openai.responses import Completion, CompletionChoice
from octavo.server.openai.sampling import completion_params
from octavo.server.openai.unsupported import check_extras
from octavo.server.stream import EventStream, event, until_disconnect


async def completions(ctx: ServerContext, request: Request) -> Response:
    """Continue one prompt or several, streamed or whole. Choice j of prompt i has the index i * n + j."""
    body = await parse_body(request, CompletionBody, ctx.config.max_body_bytes)
    reply = Reply.of(ctx, request, body, "cmpl-", check_extras(body, chat=False))
    params = completion_params(ctx, body)
    jobs = await _prepare(ctx, body, reply, params)
    writer = LogprobWriter(ctx.frontend.tokenizer, params.logprobs or 0, as_ids=bool(body.return_tokens_as_token_ids))
    if body.streamed:
        return EventStream(_stream(ctx, jobs, reply, writer))
    outputs = await until_disconnect(request.receive, collect(ctx, jobs))
    return json_response(_whole(jobs, outputs, reply, writer))


async def _prepare(ctx: ServerContext, body: CompletionBody, reply: Reply, params: SamplingParams) -> list[Job]:
    prompts, limit = body.prompt, ctx.config.max_prompts
    require(
        len(prompts) <= limit,
        "prompt",
        f"{len(prompts)} prompts",
        f"prompt must have at most {limit} prompts on this server, got {len(prompts)}.",
    )
    special = body.add_special_tokens is not False
    jobs = []
    for number, prompt in enumerate(prompts):
        try:
            job = await prepare(ctx, prompt, params, body, reply.id, add_special_tokens=special, param="prompt")
        except InvalidRequestError as exc:
            if len(prompts) > 1 and exc.param in (None, "prompt"):
                raise InvalidRequestError(exc.message, param=f"prompt.{number}", value=exc.value) from None
            raise
        jobs.append(job)
    return jobs


def _whole(jobs: list[Job], outputs: list[RequestOutput], reply: Reply, writer: LogprobWriter) -> Completion:
    counter = UsageCounter(jobs)
    choices = []
    for number, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
        counter.add(number, output)
        for choice in output.outputs:
            index = number * job.request.params.n + choice.index
            choices.append(_choice(choice, index, job, reply, writer, opens=True))
    return Completion(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=choices,
        usage=counter.usage(),
        warnings=reply.warnings,
    )


async def _stream(
    ctx: ServerContext, jobs: list[Job], reply: Reply, writer: LogprobWriter
) -> AsyncGenerator[bytes, None]:
    counter = UsageCounter(jobs)
    n = jobs[0].request.params.n
    unfinished = n * len(jobs)
    opened: set[int] = set()
    async with aclosing(run(ctx, jobs)) as outputs:
        async for number, output in outputs:
            counter.add(number, output)
            events = []
            for choice in output.outputs:
                unfinished -= choice.finish_reason is not None
                if not _tells(choice, reply):
                    continue
                index = number * n + choice.index
                part = _choice(choice, index, jobs[number], reply, writer, opens=index not in opened)
                opened.add(index)
                last = unfinished == 0 and choice is output.outputs[-1]
                events.append(event(_chunk(reply, counter, [part], last=last)))
            if events:
                yield b"".join(events)
    if reply.include_usage:
        yield event(
            Completion(
                id=reply.id,
                created=reply.created,
                model=reply.model,
                choices=[],
                usage=counter.usage(),
                warnings=reply.warnings,
            )
        )


def _tells(choice: CompletionOutput, reply: Reply) -> bool:
    """Whether a client can see anything new in this delta."""
    visible = choice.text or choice.finish_reason or choice.logprobs
    return bool(visible or (reply.return_token_ids and choice.token_ids))


def _choice(
    choice: CompletionOutput, index: int, job: Job, reply: Reply, writer: LogprobWriter, *, opens: bool
) -> CompletionChoice:
    return CompletionChoice(
        index,
        choice.text,
        writer.completion(choice, index) if choice.logprobs is not None else None,
        choice.finish_reason,
        choice.stop_reason if choice.finish_reason is not None else UNSET,
        choice.token_ids if reply.return_token_ids else UNSET,
        job.prompt_tokens if reply.return_token_ids and opens else UNSET,
    )


def _chunk(reply: Reply, counter: UsageCounter, choices: list[CompletionChoice], *, last: bool) -> Completion:
    return Completion(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=choices,
        usage=reply.chunk_usage(counter),
        warnings=reply.chunk_warnings(last=last),
    )
