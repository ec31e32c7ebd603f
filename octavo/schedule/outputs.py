"""Append sampled tokens to a request, decide whether it ends, and build the deltas that report it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from octavo.core.output import FinishReason, RequestTimes, TokenDelta, TokenLogprobs
from octavo.core.params import RepetitionDetection
from octavo.schedule.request import Request


def append(request: Request, sampled: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Append tokens to the request up to its end; return the appended tokens, and the finish reason if it ended."""
    tokens: list[int] = []
    rule = request.params.repetition_detection
    for token in sampled:
        request.tokens.append(token)
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, FinishReason.STOP
        if rule is not None and repeats(request.tokens, rule, request.num_prompt):
            return tokens, FinishReason.REPETITION
        if request.num_output >= request.max_tokens:
            return tokens, FinishReason.LENGTH
    return tokens, None


def repeats(tokens: list[int], rule: RepetitionDetection, start: int = 0) -> bool:
    """Return whether `tokens[start:]` end with a repeated pattern that matches the rule.

    Constant time below `rule.least` tokens; beyond, only earlier occurrences of the last token are compared.
    """
    end = len(tokens)
    count = end - start
    if count < rule.least:
        return False
    place, after = max(start, end - 1 - rule.max_pattern_size), end - rule.min_pattern_size
    while True:
        try:
            place = tokens.index(tokens[-1], place, after)
        except ValueError:
            return False
        size = end - 1 - place
        length = rule.covered(size)
        if length <= count and tokens[end - length : end - size] == tokens[end - length + size :]:
            return True
        place += 1


_KEY = "prompt_logprobs"


def prompt_news(request: Request, found: list[TokenLogprobs]) -> list[TokenDelta]:
    """Return the delta for the next entries of `found`. Entries sent before a preemption are not sent again when the
    prompt is recomputed."""
    preemptions, seen, sent = request.extra.get(_KEY, (0, 0, 0))
    if preemptions != request.num_preemptions:
        seen = 0
    fresh = found[max(0, sent - seen) :]
    seen += len(found)
    request.extra[_KEY] = (request.num_preemptions, seen, max(sent, seen))
    return [TokenDelta(request.id, request.index, [], prompt_logprobs=fresh)] if fresh else []


def times_at_first_token(request: Request) -> RequestTimes | None:
    """Return the times so far if this is the request's first token, else None.

    They are sent early because the front end may end the request at a stop string, without a last delta.
    """
    if request.first_token:
        return None
    request.first_token = time.monotonic()
    return RequestTimes(request.spec.arrival, request.first_scheduled, request.first_token, 0.0)


@dataclass(frozen=True, slots=True)
class Last:
    """Fields of a request's last `TokenDelta`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    complete: bool = False
    refused: str | None = None
    found: dict[str, bytes] | None = None


def last_news(request: Request, reason: FinishReason, eos: Collection[int], last: Last) -> TokenDelta:
    """Build the last delta of a request that ends for this reason."""
    tokens = last.tokens
    stopped = reason is FinishReason.STOP and not last.complete and bool(tokens)
    return TokenDelta(
        request.id,
        request.index,
        tokens,
        last.logprobs,
        request.num_cached,
        reason,
        tokens[-1] if stopped and tokens[-1] not in eos else None,
        last.error,
        RequestTimes(request.spec.arrival, request.first_scheduled, request.first_token, time.monotonic()),
        request.num_preemptions,
        last.complete,
        last.refused,
        found=last.found,
    )
