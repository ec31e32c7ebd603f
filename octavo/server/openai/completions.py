"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.output import CompletionOutput, Logprob, RequestOutput
from octavo.core.params import SamplingParams
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.generation import GenerationJob, UsageCounter, collect, extended, prepare, run
from octavo.server.openai.logprobs import EchoedPrompt, LogprobWriter, tokens_as_ids
from octavo.server.openai.protocol import CompletionBody
from octavo.server.openai.reply import Reply
from octavo.server.openai.responses import Completion, CompletionChoice
from octavo.server.openai.sampling import completion_params
from octavo.server.openai.unsupported import check_extras
from octavo.server.stream import EventStream, event, until_disconnect
from octavo.text.prompts.infill import infill_of
from octavo.text.prompts.prompt import EmbedsPrompt, Prompt

PromptEntries = list[dict[int, Logprob] | None]


async def completions(ctx: ServerContext, request: Request) -> Response:
    """Complete one prompt or several, streamed or whole. Choice j of prompt i has index i * n + j."""
    body = await parse_body(request, CompletionBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    if not ctx.frontend.tokenizer.present and not body.detokenize:
        body.detokenize = False
    reply = Reply.of(ctx, request, body, "cmpl-", check_extras(ctx, body, chat=False))
    params = completion_params(ctx, body)
    jobs = await prepare_completion(ctx, body, reply, params)
    as_ids = tokens_as_ids(ctx, body) or not params.detokenize
    writer = LogprobWriter(ctx.frontend.tokenizer, params, as_ids=as_ids)
    if body.streamed:
        return EventStream(_stream(ctx, jobs, reply, writer, body), keep_alive_s=ctx.config.sse_keep_alive_s)
    outputs = await until_disconnect(request.receive, collect(ctx, jobs))
    if body.only_echo:
        outputs = [_without_text(output) for output in outputs]
    answer = _whole(ctx, jobs, outputs, reply, writer, body)
    return json_response(extended(answer, (choice for output in outputs for choice in output.outputs)))


async def prepare_completion(
    ctx: ServerContext, body: CompletionBody, reply: Reply, params: SamplingParams
) -> list[GenerationJob]:
    """Check and tokenize each prompt.

    Raises:
        InvalidRequestError: there are too many prompts, or one can't be served.
    """
    embeds = body.prompt_embeds or []
    if embeds:
        _check_embeds(body)
    texts = _with_suffix(ctx, body) if body.prompt != [""] or not embeds else []
    prompts, limit = [*embeds, *texts], ctx.config.max_prompts
    require(
        len(prompts) <= limit,
        "prompt",
        f"{len(prompts)} prompts",
        f"prompt must have at most {limit} prompts on this server, got {len(prompts)}.",
    )
    special = body.add_special_tokens is not False
    jobs = []
    given: list[Prompt] = [EmbedsPrompt(prompt_embeds=one) for one in embeds]
    given += texts
    for number, prompt in enumerate(given):
        try:
            job = await prepare(ctx, prompt, params, body, reply.id, add_special_tokens=special, param="prompt")
        except InvalidRequestError as exc:
            if len(prompts) > 1 and exc.param in (None, "prompt", "prompt_embeds"):
                field = f"prompt_embeds.{number}" if number < len(embeds) else f"prompt.{number - len(embeds)}"
                raise InvalidRequestError(exc.message, param=field, value=exc.value) from None
            raise
        jobs.append(job)
    return jobs


def _check_embeds(body: CompletionBody) -> None:
    """Refuse options that need the prompt's text, which prompt embeddings don't have."""
    for name, value in (("echo", body.echo), ("suffix", body.suffix)):
        require(not value, name, value, f"{name} is unsupported with prompt embeds, which have no text; leave it out.")


def _with_suffix(ctx: ServerContext, body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts; with a suffix, in the model's infill format."""
    suffix = body.suffix
    if not suffix:
        return body.prompt
    require(not body.echo, "echo", body.echo, "echo can't be combined with suffix; leave one of them out.")
    form = infill_of(ctx.frontend.tokenizer)
    if form is None:
        raise UnsupportedError(
            "suffix needs a model with fill-in-the-middle tokens, which this one lacks; leave it out.",
            param="suffix",
            value=suffix,
        )
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    require(len(texts) == len(body.prompt), "suffix", suffix, "suffix needs a prompt that is text, not token ids.")
    return [form.write(text, suffix) for text in texts]


def _whole(
    ctx: ServerContext,
    jobs: list[GenerationJob],
    outputs: list[RequestOutput],
    reply: Reply,
    writer: LogprobWriter,
    body: CompletionBody,
) -> Completion:
    counter = UsageCounter(ctx, jobs)
    choices = []
    for number, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
        counter.add(number, output)
        best = _best(output.outputs, body.answered) if body.choices > body.answered else output.outputs
        for place, choice in enumerate(best):
            if body.logprobs is None:
                choice.logprobs = None
            index = number * body.answered + place
            echo = _echo(ctx, job, output) if body.echo else None
            told = output.prompt_logprobs if body.prompt_logprobs is not None else None
            choices.append(_choice(choice, index, job, reply, writer, absent=None, echo=echo, told=told))
    return Completion(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=choices,
        usage=counter.usage(),
        service_tier=None,
        system_fingerprint=reply.fingerprint,
        metrics=counter.timings(),
        warnings=reply.warnings,
    )


def _best(choices: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """Return the choices with the highest cumulative log-probability, best first."""
    return sorted(choices, key=lambda choice: -(choice.cumulative_logprob or 0.0))[:count]


async def _stream(
    ctx: ServerContext, jobs: list[GenerationJob], reply: Reply, writer: LogprobWriter, body: CompletionBody
) -> AsyncGenerator[bytes, None]:
    counter = UsageCounter(ctx, jobs)
    only_echo = body.only_echo
    n = jobs[0].request.params.n
    unfinished = n * len(jobs)
    opened: set[int] = set()
    async with aclosing(run(ctx, jobs)) as outputs:
        async for number, output in outputs:
            output = _without_text(output) if only_echo else output
            counter.add(number, output)
            events = []
            for choice in output.outputs:
                unfinished -= choice.finish_reason is not None
                if not _tells(choice, reply):
                    continue
                index = number * n + choice.index
                opens = index not in opened
                echo = _echo(ctx, jobs[number], output) if body.echo and opens else None
                part = _choice(choice, index, jobs[number], reply, writer, absent=UNSET, opens=opens, echo=echo)
                opened.add(index)
                last = unfinished == 0 and choice is output.outputs[-1]
                chunk = reply.chunk(Completion, counter, [part], ends=reply.ends(last=last))
                events.append(event(chunk if choice.extra is None else extended(chunk, [choice])))
            if events:
                yield b"".join(events)
    if reply.include_usage:
        yield event(reply.chunk(Completion, counter, [], ends=True))


def _without_text(output: RequestOutput) -> RequestOutput:
    """Remove the one token that had to be generated for a request that asks only for its prompt's data."""
    for choice in output.outputs:
        choice.text, choice.token_ids = "", []
        choice.logprobs = None if choice.logprobs is None else []
    return output


def _tells(choice: CompletionOutput, reply: Reply) -> bool:
    """Return whether this delta has anything new for the client."""
    visible = choice.text or choice.finish_reason or choice.logprobs
    return bool(visible or (reply.return_token_ids and choice.token_ids))


@dataclass(frozen=True, slots=True)
class _Echo:
    """The prompt, sent before the first text of a choice."""

    text: str
    logprobs: EchoedPrompt


def _choice(
    choice: CompletionOutput,
    index: int,
    job: GenerationJob,
    reply: Reply,
    writer: LogprobWriter,
    *,
    absent: UnsetType | None,
    opens: bool = True,
    echo: _Echo | None = None,
    told: PromptEntries | None = None,
) -> CompletionChoice:
    """Return a choice.

    Args:
        absent: value of fields that were not requested: None (null) in a whole answer, UNSET in a chunk.
    """
    before = echo.logprobs if echo else ()
    return CompletionChoice(
        index,
        echo.text + choice.text if echo else choice.text,
        writer.completion(choice, index, before) if choice.logprobs is not None else None,
        choice.finish_reason,
        choice.stop_reason if choice.finish_reason is not None else UNSET,
        choice.token_ids if reply.return_token_ids else absent,
        job.prompt_tokens if reply.return_token_ids and opens else absent,
        absent if told is None else writer.prompt(told),
    )


def _echo(ctx: ServerContext, job: GenerationJob, output: RequestOutput) -> _Echo:
    """Return the prompt as text, and its log-probabilities if they were computed."""
    text = job.text
    if text is None:
        text = ctx.frontend.tokenizer.decode(job.prompt_tokens, skip_special_tokens=False)
    return _Echo(text, list(zip(job.prompt_tokens, output.prompt_logprobs or (), strict=False)))
