"""Outputs: of a step (`StepOutput`), over the wire (`TokenDelta`), and for the user (`RequestOutput`)."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec


class FinishReason(enum.StrEnum):
    """The terminal states. Every request ends in exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities, or logits, at one output position; see `LogprobsMode`.

    Attributes:
        logprob: of the chosen token.
        rank: of the chosen token; 1 is the most likely.
        top_ids, top_logprobs: the most likely tokens, best first, as many as requested.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


BAD_LOGITS = "The model produced no usable logits (NaN or infinite) for this request."
"""Entry of `StepOutput.errors` for a row that can't be sampled with any parameters."""


class TransferState(enum.StrEnum):
    """What a worker reports of a transfer.

    READ: the blocks of a store were read and may be written again; the tier does not hold the pages yet.
    ENDED: nothing is left to do, and nothing writes to the blocks any more.
    UNKNOWN: the worker never began it, or has reported its end before.
    """

    READ = "read"
    ENDED = "ended"
    UNKNOWN = "unknown"


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """The report of a transfer.

    Attributes:
        failed: indices of its pages that could not be moved.
    """

    ticket: int
    state: TransferState
    failed: list[int] = []


class StepOutput(msgspec.Struct, frozen=True):
    """Output of one step; rows are in the plan's order.

    Attributes:
        tokens: the sampled tokens of each row: none if it does not sample, else 1 to 1 + num_drafts.
        logprobs: row -> one entry per token, if requested.
        errors: row -> why it could not be sampled; its tokens are void.
        prompt_logprobs: row -> entries of the prompt tokens that follow the computed ones, if requested.
        found: row -> feature name -> encoded result of that feature's worker half.
        drafts: row -> number of drafts proposed after its tokens, for rows of `StepPlan.proposals`; a row without an
            entry may have as many as planned.
        drafted: row -> these drafts, for the same rows, if the plan `reports_drafts`.
        idle_s: seconds for which the device was idle between the previous step, if it was still running, and this one.
        moved: reports of transfers, begun with this step or before it.
    """

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    found: dict[int, dict[str, bytes]] = msgspec.field(default_factory=dict)
    idle_s: float = 0.0
    drafts: dict[int, int] = msgspec.field(default_factory=dict)
    moved: list[Moved] = []
    drafted: dict[int, list[int]] = msgspec.field(default_factory=dict)


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """One request's milestones, in seconds of `time.monotonic()`; 0.0 for those not reached."""

    arrival: float
    first_scheduled: float
    first_token: float
    finished: float


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New output of one choice of a request: tokens, and at the end the finish reason.

    Attributes:
        id, index: the request, and the index of the choice.
        tokens: newly sampled tokens, including a stop token that ended the choice.
        logprobs: one entry per token, if requested.
        num_cached: prompt tokens found in the prefix cache.
        finish: set on the last delta of the choice, exactly once.
        stop_reason: the token id that ended the choice, unless it is an end-of-sequence token.
        error: the error's text, if `finish` is ERROR.
        complete: the output itself ended the choice; the last token is part of it, not a stop token.
        prompt_logprobs: the next entries, if requested; the first prompt token has none.
        refused: the field at fault, if the request was invalid and so nothing was generated.
        times: set with `finish`; with the first token, those known by then.
        num_preemptions: set with `finish`.
        found: feature name -> data for the feature's text half; set with `finish`.
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


def failed(request_id: str, indices: Iterable[int], error: str, refused: str | None = None) -> list[TokenDelta]:
    """Return the only deltas of these choices of a request: it ended with an error before it was queued."""
    return [
        TokenDelta(request_id, index, [], finish=FinishReason.ERROR, error=error, refused=refused) for index in indices
    ]


@dataclass(slots=True)
class Logprob:
    """One token's log-probability, for the user."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """How many draft tokens of an output the model accepted, and how many it rejected."""

    accepted: int
    rejected: int


@dataclass(slots=True)
class CompletionOutput:
    """One choice: all output so far (CUMULATIVE, FINAL_ONLY) or the new output (DELTA).

    Attributes:
        cumulative_logprob: of all its tokens, if `logprobs` were requested or a feature provides it.
        stop_reason: the stop string or stop token that ended it; the error's text after an error.
        drafts: set in the last item if the engine drafts.
        extra: further fields of the answer, by features; in the last item.
    """

    lora_request: ClassVar[None] = None

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    drafts: VerifiedDrafts | None = None
    extra: dict[str, Any] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request that has ended; 0.0 for milestones not reached.

    Attributes:
        arrival_time: in seconds since the epoch.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: in seconds of `time.monotonic()`.
        first_token_latency: seconds from arrival to the first token.
        num_generation_tokens: tokens in this item, over all its choices.
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
    """An item of `generate`: the prompt and its choices, in the order of their index.

    Attributes:
        times, num_preemptions: over all choices; `times` is set in the last item.
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
        """Times of the request; set in the last item."""
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
