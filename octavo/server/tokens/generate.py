"""`POST /inference/v1/generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.output import CompletionOutput
from octavo.core.params import SamplingParams
from octavo.server.body import parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.generation import GenerationJob, UsageCounter, collect, extended, prepare, run
from octavo.server.openai.logprobs import LogprobWriter
from octavo.server.openai.reply import Reply
from octavo.server.openai.sampling import completion_params
from octavo.server.openai.unsupported import check_extras
from octavo.server.stream import EventStream, event, until_disconnect
from octavo.server.tokens.protocol import GenerateBody, GenerateChoice, Generated, GeneratedChunk, as_completion


async def generate(ctx: ServerContext, request: Request) -> Response:
    """Continue a prompt of token ids, whole or streamed."""
    body = await parse_body(request, GenerateBody, ctx.config.max_body_bytes)
    asked = as_completion(body)
    ctx = await ctx.for_request(request, asked.model, asked)
    reply = Reply.of(ctx, request, asked, "", check_extras(ctx, asked, chat=False))
    params = completion_params(ctx, asked, defaults={})
    if (body.sampling_params or {}).get("skip_reading_prefix_cache"):
        params = params.replace(skip_reading_prefix_cache=True)
    job = await prepare(ctx, body.token_ids, params, asked, reply.id, add_special_tokens=False, param="token_ids")
    writer = LogprobWriter(ctx.frontend.tokenizer, _told(params), as_ids=True)
    if asked.streamed:
        return EventStream(_stream(ctx, job, reply, writer), keep_alive_s=ctx.config.sse_keep_alive_s)
    (output,) = await until_disconnect(request.receive, collect(ctx, [job]))
    counter = UsageCounter(ctx, [job])
    counter.add(0, output)
    answer = Generated(
        request_id=reply.id,
        choices=[_choice(choice, writer) for choice in output.outputs],
        prompt_logprobs=writer.prompt(output.prompt_logprobs),
        usage=counter.usage(),
        warnings=reply.warnings,
    )
    return json_response(extended(answer, output.outputs))


def _told(params: SamplingParams) -> SamplingParams:
    """Request at least one candidate with log-probabilities: the token itself."""
    return params.replace(logprobs=1) if params.logprobs == 0 else params


def _choice(choice: CompletionOutput, writer: LogprobWriter) -> GenerateChoice:
    return GenerateChoice(choice.index, writer.chat(choice), choice.finish_reason, choice.token_ids)


async def _stream(
    ctx: ServerContext, job: GenerationJob, reply: Reply, writer: LogprobWriter
) -> AsyncGenerator[bytes, None]:
    counter = UsageCounter(ctx, [job])
    unfinished = job.request.params.n
    async with aclosing(run(ctx, [job])) as outputs:
        async for number, output in outputs:
            counter.add(number, output)
            for choice in output.outputs:
                unfinished -= choice.finish_reason is not None
                if choice.token_ids or choice.finish_reason is not None:
                    chunk = GeneratedChunk(
                        request_id=reply.id,
                        choices=[_choice(choice, writer)],
                        usage=reply.chunk_usage(counter),
                        warnings=reply.warnings if reply.ends(last=not unfinished) else UNSET,
                    )
                    yield event(chunk if choice.extra is None else extended(chunk, [choice]))
    if reply.include_usage:
        yield event(GeneratedChunk(request_id=reply.id, choices=[], usage=counter.usage(), warnings=reply.warnings))
