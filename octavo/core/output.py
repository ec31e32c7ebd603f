"""What comes back: from a step (`StepOutput`), over the wire (`TokenDelta`), and to the user (`RequestOutput`)."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec


class FinishReason(enum.StrEnum):
    """The terminal states. Every request ends in exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, or logits, as `LogprobsMode` says.

    Attributes:
        logprob: of the token that was chosen.
        rank: of the token that was chosen; 1 is the most likely.
        top_ids, top_logprobs: the most likely tokens, best first, as many as were asked for.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


BAD_LOGITS = "The model produced no usable logits (NaN or infinite) for this request."
"""Among `StepOutput.errors`: the rows that can't be sampled whatever the parameters."""


class StepOutput(msgspec.Struct, frozen=True):
    """What one step produced, row by row in the plan's order.

    Attributes:
        tokens: per row the tokens sampled: 0 for a row that does not sample, else 1 to 1 + num_drafts.
        logprobs: row -> one entry a token, for rows that asked for them.
        errors: row -> why it could not be sampled; its tokens are void.
        prompt_logprobs: row -> those of the prompt tokens that follow the tokens it computed, where asked for.
        found: row -> feature name -> what that feature's worker half made of it, encoded.
        idle_s: seconds for which the device stood still between the step before, if one was under way, and this one.
    """

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    found: dict[int, dict[str, bytes]] = msgspec.field(default_factory=dict)
    idle_s: float = 0.0


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """One request's milestones on the machine's monotonic clock, in seconds; 0.0 where it never got there."""

    arrival: float
    first_scheduled: float
    first_token: float
    finished: float


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """News of one choice of one request: tokens, and at the end why it ended.

    Attributes:
        id, index: the request and which of its `n` choices.
        tokens: newly sampled; an ending stop token is among them.
        logprobs: one a token, if asked for.
        num_cached: prompt tokens found in the prefix cache.
        finish: set on the last delta of the choice, exactly once.
        stop_reason: the token id that ended it, when that was not an end-of-sequence token.
        error: what went wrong, when `finish` is ERROR.
        complete: it was ended by what it holds; its last token is part of the output, not a mark of its end.
        prompt_logprobs: the next ones, if asked for; those of the first token, which has none, are left out.
        refused: the field at fault, when the error is the request's own and nothing was generated because of it.
        times: set with `finish`, and so far as they are known with the first token.
        num_preemptions: set with `finish`.
        found: feature name -> what that feature sends to its text half; set with `finish`.
    """

    id: str
    index: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0
    finish: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    times: RequestTimes | None = None
    num_preemptions: int = 0
    complete: bool = False
    refused: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    found: dict[str, bytes] | None = None


@dataclass(slots=True)
class Logprob:
    """One token's log-probability as users see it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice: the whole so far (CUMULATIVE, FINAL_ONLY) or what is new (DELTA).

    Attributes:
        cumulative_logprob: of all its tokens, if `logprobs` were asked for, or if a feature knows it.
        stop_reason: the stop string or stop token that ended it, or, for an error, what went wrong.
    """

    lora_request: ClassVar[None] = None

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request that has ended; 0.0 where it never got there.

    Attributes:
        arrival_time: in seconds since the epoch.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: on the machine's monotonic clock, in seconds.
        first_token_latency: seconds from arrival to the first token.
        num_generation_tokens: of the choices that the item holds, as much as it holds of them.
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    num_generation_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """What `generate` yields: the prompt and its choices, in the order of their index.

    Attributes:
        times, num_preemptions: of all choices; the former with the last item.
    """

    lora_request: ClassVar[None] = None

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    times: RequestTimes | None = None
    num_preemptions: int = 0

    @property
    def metrics(self) -> RequestMetrics | None:
        """Set with the last item."""
        times = self.times
        if times is None:
            return None
        return RequestMetrics(
            arrival_time=time.time() - (time.monotonic() - times.arrival),
            queued_ts=times.arrival,
            scheduled_ts=times.first_scheduled,
            first_token_ts=times.first_token,
            last_token_ts=times.finished,
            first_token_latency=times.first_token - times.arrival if times.first_token else 0.0,
            num_generation_tokens=sum(len(choice.token_ids) for choice in self.outputs),
        )
