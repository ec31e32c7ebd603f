"""Processing of one HTTP request: preparation, counting, logging, and release in every case."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from msgspec import UNSET, Struct, UnsetType, to_builtins

from octavo.core.errors import is_internal
from octavo.core.output import (
    BAD_LOGITS,
    CompletionOutput,
    FinishReason,
    RequestOutput,
    RequestTimes,
    VerifiedDrafts,
)
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import UNFOLLOWED
from octavo.server.context import ServerContext, engine_id
from octavo.server.errors import ApiError
from octavo.server.merge import merge
from octavo.server.openai.protocol import GenerationBody
from octavo.server.openai.responses import CachedTokens, CompletionTokens, Timings, Usage
from octavo.text.detokenize.choice import Ender
from octavo.text.prompts.prompt import Prompt

T = TypeVar("T")

_LEAVING_TOKENS = ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
"""Parameters that forbid tokens; together they may forbid all."""


@dataclass(slots=True, frozen=True)
class GenerationJob:
    """One prompt, ready for the engine.

    Attributes:
        params: as requested; options of engine features are stored separately in the request.
        ender: creates the detector of additional ends in a choice's text.
    """

    request: GenerateRequest
    text: str | None
    params: SamplingParams
    ender: Callable[[], Ender | None] | None = None

    @property
    def prompt_tokens(self) -> list[int]:
        return self.request.tokens


async def prepare(
    ctx: ServerContext,
    prompt: Prompt,
    params: SamplingParams,
    body: GenerationBody,
    response_id: str,
    *,
    add_special_tokens: bool,
    param: str,
) -> GenerationJob:
    """Tokenize and check one prompt. `param` is the field that it is from.

    Raises:
        InvalidRequestError: the prompt is empty or too long, or a parameter names a token that does not exist.
    """
    request = await ctx.frontend.prepare_async(
        prompt,
        params,
        request_id=engine_id(response_id),
        priority=ctx.priority(body.priority),
        tenant=ctx.tenant,
        namespace=body.cache_salt or "",
        truncate=body.truncate_prompt_tokens,
        side=body.truncation_side or "left",
        add_special_tokens=add_special_tokens,
        param=param,
        options=ctx.options,
    )
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return GenerationJob(request, text if isinstance(text, str) else None, params)


def run(ctx: ServerContext, jobs: Sequence[GenerationJob]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (job number, output) of all jobs as they arrive. Closing the generator aborts unfinished jobs."""
    sources = [_tracked(ctx, number, job) for number, job in enumerate(jobs)]
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    async with aclosing(merge(sources)) as items:
        async for _, item in items:
            yield item


async def collect(ctx: ServerContext, jobs: Sequence[GenerationJob]) -> list[RequestOutput]:
    """Return the last output of each job, in the order of the jobs."""
    last: dict[int, RequestOutput] = {}
    async with aclosing(run(ctx, jobs)) as outputs:
        async for number, output in outputs:
            last[number] = output
    return [last[number] for number in range(len(jobs))]


def extended(answer: Struct, choices: Iterable[CompletionOutput]) -> Any:
    """Return an answer with the fields that features add to it."""
    extra = {name: value for choice in choices for name, value in (choice.extra or {}).items()}
    return to_builtins(answer) | extra if extra else answer


async def _tracked(
    ctx: ServerContext, number: int, job: GenerationJob
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    transcript = None
    try:
        with ctx.in_flight(job.request) as record:
            transcript = ctx.transcripts.begin(job.request, job.text)

            def observe(output: RequestOutput) -> None:
                record.observe(output)
                if transcript is not None:
                    transcript.add(output)

            begun = partial(ctx.admission.begun, job.request)
            outputs = ctx.frontend.generate(
                job.request, job.text, ender=job.ender, on_begin=begun, on_early_end=observe
            )
            async with aclosing(cast("AsyncGenerator[RequestOutput, None]", outputs)):
                async for output in outputs:
                    observe(output)
                    _check(output, job.params)
                    if ctx.background:
                        check_not_aborted(output)
                    yield number, output
    finally:
        if transcript is not None:
            transcript.end()


def _check(output: RequestOutput, params: SamplingParams) -> None:
    """Raise ApiError if the engine failed a choice."""
    for choice in output.outputs:
        if choice.finish_reason == "error":
            raise _failure(str(choice.stop_reason), params)


def check_not_aborted(output: RequestOutput) -> None:
    """Raise ApiError, upon which clients send the request again, if the engine aborted a choice."""
    if any(choice.finish_reason == FinishReason.ABORT for choice in output.outputs):
        raise ApiError(
            503,
            "The server aborted this request before its answer was complete, as for a pause, a sleep or a shutdown. "
            "Send it again.",
        )


def _failure(reason: str, params: SamplingParams) -> ApiError:
    """Return the error for a request that the engine failed.

    The status is 400 if the request itself is the cause, so that clients don't retry. The details of a fault are only
    in the log.
    """
    if is_internal(reason):
        return ApiError(500, "The engine could not finish this request; send it again. The log has the reason.")
    form = params.structured_outputs
    if form is not None and reason.startswith(UNFOLLOWED):
        return ApiError(400, reason, param=form.param)
    limits = [name for name in _LEAVING_TOKENS if getattr(params, name)]
    if reason == BAD_LOGITS and limits:
        text = f"No token is possible after the generated text: {' and '.join(limits)} leave none. Loosen one of them."
        return ApiError(400, text, param=limits[0])
    return ApiError(500, f"The engine could not finish this request: {reason}")


class UsageCounter:
    """Sums up one HTTP request's tokens and timings."""

    def __init__(self, ctx: ServerContext, jobs: Sequence[GenerationJob]) -> None:
        self._tells_cached = ctx.config.enable_prompt_tokens_details
        self._prompt = sum(len(job.prompt_tokens) for job in jobs)
        self._cached = [0] * len(jobs)
        self._completion = 0
        alone = len(jobs) == 1 and jobs[0].request.params.n == 1
        self._tells_times = ctx.config.enable_per_request_metrics and alone
        self._times: RequestTimes | None = None
        self.reasoning_tokens: int | None = None
        """Generated tokens that are reasoning; None if reasoning is not separated."""
        self._drafts: list[VerifiedDrafts] = []

    def add(self, number: int, output: RequestOutput) -> None:
        """Count what is new in `output`: a DELTA, or the only output."""
        self._cached[number] = max(self._cached[number], output.num_cached_tokens)
        self._times = output.times
        for choice in output.outputs:
            self._completion += len(choice.token_ids)
            if choice.drafts is not None:
                self._drafts.append(choice.drafts)

    def usage(self) -> Usage:
        return Usage(
            self._prompt,
            self._completion,
            self._prompt + self._completion,
            CachedTokens(sum(self._cached)) if self._tells_cached else UNSET,
            self._details(),
        )

    def _details(self) -> CompletionTokens | UnsetType:
        reasoning: int | UnsetType = UNSET if self.reasoning_tokens is None else self.reasoning_tokens
        if self._drafts:
            accepted, rejected = (sum(one.accepted for one in self._drafts), sum(one.rejected for one in self._drafts))
            return CompletionTokens(reasoning, accepted, rejected)
        return UNSET if reasoning is UNSET else CompletionTokens(reasoning)

    def timings(self, *, streamed: bool = False) -> Timings | UnsetType:
        """Return timings at the end, if the settings enable them. With several choices there are none."""
        if not self._tells_times or self._times is None:
            return UNSET
        told = timings(self._times, self._completion)
        return told.streamed() if streamed else told


def timings(times: RequestTimes, tokens: int) -> Timings:
    """Return the timings of a request that has generated `tokens` tokens."""
    decode = _span_ms(times.first_token, times.finished)
    inference = _span_ms(times.first_scheduled, times.finished)
    return Timings(
        time_to_first_token_ms=_span_ms(times.first_scheduled, times.first_token),
        generation_time_ms=decode,
        queue_time_ms=_span_ms(times.arrival, times.first_scheduled),
        mean_itl_ms=decode / (tokens - 1) if decode is not None and tokens > 1 else None,
        tokens_per_second=tokens / inference * 1000 if inference else None,
    )


def _span_ms(begin: float, end: float) -> float | None:
    """Return the milliseconds between two milestones; None if the request did not reach both."""
    return (end - begin) * 1000 if begin and end else None
