"""Measurements of each generation request, from its outputs."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.core.errors import InvalidRequestError, SlowReaderError
from octavo.core.output import FinishReason, RequestOutput, RequestTimes
from octavo.core.params import OutputKind
from octavo.core.request import GenerateRequest
from octavo.server.metrics.histogram import BucketCounts
from octavo.server.metrics.tenants import TenantMetrics

logger = logging.getLogger("octavo.server.requests")

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_RECENT = 1024
_SMALL = (0, 1, 2, 5, 10, 20, 50, 100)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _SLOW),
    "inter_token_latency_seconds": (
        "Time between successive outputs of a choice; for a response that is not streamed, the mean.",
        _FAST,
    ),
    "request_time_per_output_token_seconds": ("A request's mean time per token after the first.", _FAST),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", _SLOW),
    "request_queue_time_seconds": ("Time from a request's arrival to its first step.", _SLOW),
    "request_inference_time_seconds": ("Time from a request's first step to its end.", _SLOW),
    "request_prefill_time_seconds": ("Time from a request's first step to its first token.", _SLOW),
    "request_decode_time_seconds": ("Time from a request's first token to its end.", _SLOW),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request, summed over choices.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not in the prefix cache.", _TOKENS),
    "request_params_n": ("The parameter n of a request.", (1, 2, 5, 10, 20, 50)),
    "request_params_max_tokens": ("The parameter max_tokens of a request, resolved.", _TOKENS),
    "request_num_preemptions": ("How often a request was preempted.", _SMALL),
}


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that has ended.

    Attributes:
        arrival: time of arrival, by `time.monotonic`.
        reasons: finish reason of each choice.
        generated: tokens of all choices.
        cached: prompt tokens found in the prefix cache.
        times: None if it ended before the engine reported any.
    """

    request: GenerateRequest
    arrival: float
    reasons: Sequence[str]
    generated: int
    cached: int
    preemptions: int
    times: RequestTimes | None


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is kept of a request that has ended. Times are by `time.monotonic`, 0.0 for what did not happen.

    Attributes:
        begun: when its prompt was tokenized and it was admitted to the engine.
        first_output, last_output: when output was ready to be sent to the client.
        cause: who or what ended it early; "" if it was completed.
    """

    id: str
    arrival: float
    begun: float
    first_output: float
    last_output: float
    ended: float
    prompt_tokens: int
    generated: int
    reasons: Sequence[str]
    cause: str


class Tracing(Protocol):
    """Receives each request's end, for its trace."""

    def begin(self) -> Any:
        """Return the trace of the current task."""
        ...

    def end(self, parent: Any, ended: FinishedRequest) -> None:
        """Record the end of a request; `parent` is what `begin` returned."""
        ...


class RequestHistograms:
    """Histograms over finished requests, and counts of finish reasons."""

    def __init__(self, *, log_requests: bool = False, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.histograms = {name: BucketCounts(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.refused: Counter[str] = Counter({"requests": 0, "tokens": 0, "tenant": 0})
        """Refused requests by limit."""
        self.finished: Counter[str] = Counter(dict.fromkeys((reason.value for reason in FinishReason), 0))
        self.live: set[RequestRecord] = set()
        """Requests that have not ended."""
        self.tenants = TenantMetrics()
        self.recent: deque[EndedRequest] = deque(maxlen=_RECENT)
        """The last requests that have ended."""
        self._log_level = logging.INFO if log_requests else logging.DEBUG

    def begin(self, request: GenerateRequest) -> RequestRecord:
        """Start to follow `request`; the caller must end the record, however the request ends."""
        record = RequestRecord(self, request)
        self.live.add(record)
        self.tenants.begin(request.tenant)
        return record

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def log_level(self, *, completed: bool) -> int:
        """Return the level at which a request's end is logged: those that were not completed always are."""
        return self._log_level if completed else logging.INFO


class RequestRecord:
    """One active request. `observe` runs for every chunk and must be fast.

    Attributes:
        arrival: time of arrival, by `time.monotonic`.
        begun, first_output, last_output: as of `EndedRequest`.
    """

    __slots__ = (
        "_cached",
        "_cause",
        "_last",
        "_latency",
        "_metrics",
        "_preemptions",
        "_reasons",
        "_refused",
        "_streamed",
        "_times",
        "_tokens",
        "_trace",
        "_unfinished",
        "arrival",
        "begun",
        "first_output",
        "last_output",
        "request",
    )

    def __init__(self, metrics: RequestHistograms, request: GenerateRequest) -> None:
        self._metrics = metrics
        self._trace = metrics.tracing.begin() if metrics.tracing else None
        self.request = request
        self._streamed = request.params.output_kind is OutputKind.DELTA
        self._latency = metrics.histograms["inter_token_latency_seconds"]
        self.begun = time.monotonic()
        self.arrival = request.arrival or self.begun
        self.first_output = self.last_output = 0.0
        self._last: dict[int, float] = {}
        self._tokens = [0] * request.params.n
        self._reasons: dict[int, str] = {}
        self._cached = 0
        self._preemptions = 0
        self._times: RequestTimes | None = None
        self._unfinished = FinishReason.ABORT.value
        self._cause = ""
        self._refused = False

    def observe(self, output: RequestOutput) -> None:
        """Count what is new in `output`."""
        now = time.monotonic()
        for choice in output.outputs:
            index = choice.index
            if choice.token_ids:
                self._tokens[index] += len(choice.token_ids)
                self.last_output = now
                self.first_output = self.first_output or now
                if self._streamed:
                    self._follow(index, now)
            if choice.finish_reason is not None:
                self._reasons[index] = choice.finish_reason
        self._cached = max(self._cached, output.num_cached_tokens)
        if output.times is not None:
            self._times = output.times
            self._preemptions = max(self._preemptions, output.num_preemptions)

    def observe_whole(self, times: RequestTimes | None, *, cached: int, preemptions: int) -> None:
        """Record a request without generation, when its answer is complete."""
        self._reasons[0] = FinishReason.STOP.value
        self._times, self._cached, self._preemptions = times, cached, preemptions

    def fail(self, error: Exception) -> None:
        """Count unfinished choices as failed by `error`, unless the client is its cause (`SlowReaderError`)."""
        if not isinstance(error, SlowReaderError):
            self._unfinished = FinishReason.ERROR.value
        # A message about a field may quote its value, which is not to be logged.
        field = getattr(error, "param", None)
        self._refused = isinstance(error, InvalidRequestError) or getattr(error, "status", 500) < 500
        self._cause = f"refused for its {field}" if field else str(error)

    def cut(self, cause: str) -> None:
        """Record who ends the unfinished choices early, unless that is known."""
        if len(self._reasons) < self.request.params.n:
            self._cause = self._cause or cause

    def cut_by_engine(self, cause: str) -> None:
        """Record what made the engine abort choices, if it did and nothing else is known."""
        if FinishReason.ABORT.value in self._reasons.values():
            self._cause = self._cause or cause

    def _follow(self, index: int, now: float) -> None:
        last = self._last.get(index)
        if last is not None:
            self._latency.observe(now - last)
        elif not self._last:
            self._metrics.observe("time_to_first_token_seconds", now - self.arrival)
        self._last[index] = now

    def end(self) -> None:
        """Add the request to the histograms. Unfinished choices count as aborted, after `fail` as failed."""
        metrics, params = self._metrics, self.request.params
        metrics.live.discard(self)
        total = sum(self._tokens)
        reasons = [self._reasons.get(index, self._unfinished) for index in range(params.n)]
        metrics.finished.update(reasons)
        metrics.observe("request_prompt_tokens", len(self.request.tokens))
        metrics.observe("request_generation_tokens", total)
        metrics.observe("request_max_num_generation_tokens", max(self._tokens))
        metrics.observe("request_prefill_kv_computed_tokens", len(self.request.tokens) - self._cached)
        metrics.observe("request_params_n", params.n)
        if params.max_tokens is not None and not self.request.prompt_only:
            metrics.observe("request_params_max_tokens", params.max_tokens)
        metrics.observe("request_num_preemptions", self._preemptions)
        if self._times is not None:
            self._observe_times(self._times)
        metrics.tenants.end(
            self.request.tenant,
            prompt=len(self.request.tokens),
            cached=self._cached,
            generated=total,
            queued_s=self._queued_s(),
        )
        completed = self._refused or not {FinishReason.ABORT.value, FinishReason.ERROR.value} & set(reasons)
        level = metrics.log_level(completed=completed)
        if logger.isEnabledFor(level):
            logger.log(level, "%s", self._line(total, reasons))
        metrics.recent.append(self._ended(total, reasons))
        if metrics.tracing is not None:
            ended = FinishedRequest(
                self.request, self.arrival, reasons, total, self._cached, self._preemptions, self._times
            )
            metrics.tracing.end(self._trace, ended)

    def _queued_s(self) -> float:
        """Return the time from its arrival to its first step, or to its end if it had none."""
        begun = 0.0 if self._times is None else self._times.first_scheduled
        return max(0.0, (begun or time.monotonic()) - self.arrival)

    def _ended(self, total: int, reasons: Sequence[str]) -> EndedRequest:
        return EndedRequest(
            id=self.request.id,
            arrival=self.arrival,
            begun=self.begun,
            first_output=self.first_output,
            last_output=self.last_output,
            ended=time.monotonic(),
            prompt_tokens=len(self.request.tokens),
            generated=total,
            reasons=reasons,
            cause=self._cause,
        )

    def _observe_times(self, times: RequestTimes) -> None:
        metrics = self._metrics
        metrics.observe("e2e_request_latency_seconds", times.finished - times.arrival)
        if times.first_scheduled:
            metrics.observe("request_queue_time_seconds", times.first_scheduled - times.arrival)
            metrics.observe("request_inference_time_seconds", times.finished - times.first_scheduled)
        if times.first_token:
            self._observe_decode(times)

    def _observe_decode(self, times: RequestTimes) -> None:
        metrics = self._metrics
        decode = times.finished - times.first_token
        if times.first_scheduled:
            metrics.observe("request_prefill_time_seconds", times.first_token - times.first_scheduled)
        metrics.observe("request_decode_time_seconds", decode)
        later = max(self._tokens) - 1
        if later > 0:
            metrics.observe("request_time_per_output_token_seconds", decode / later)
        if not self._streamed:
            metrics.observe("time_to_first_token_seconds", times.first_token - times.arrival)
            if later > 0:
                self._latency.observe(decode / later, later)

    def _line(self, total: int, reasons: Sequence[str]) -> str:
        request, times = self.request, self._times
        line = (
            f"Request {request.id} ended ({','.join(reasons)}): {len(request.tokens)} prompt tokens, "
            f"{self._cached} of them cached, {total} generated"
        )
        if self._preemptions:
            line += f", preempted {self._preemptions} times"
        cause = f": {self._cause}" if self._cause else ""
        if times is None:
            return f"{line}, {time.monotonic() - self.arrival:.3f} s{cause}"
        queued = max(times.first_scheduled - times.arrival, 0.0)
        first = max(times.first_token - times.arrival, 0.0)
        return (
            f"{line}, {times.finished - times.arrival:.3f} s (queued {queued:.3f} s, first token after {first:.3f} s)"
            f"{cause}"
        )
