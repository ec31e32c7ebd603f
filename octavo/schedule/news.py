"""What the scheduler tells of requests besides their tokens: of their prompts, each place once, and of their ends."""

from __future__ import annotations

import time
from collections.abc import Collection

from octavo.core.output import FinishReason, RequestTimes, TokenDelta, TokenLogprobs
from octavo.core.request import Request

_KEY = "prompt_logprobs"


def prompt_news(request: Request, found: list[TokenLogprobs]) -> list[TokenDelta]:
    """The news in the next entries of `found`; none where it was told before a preemption, after which the prompt is
    computed again."""
    preemptions, seen, sent = request.extra.get(_KEY, (0, 0, 0))
    if preemptions != request.num_preemptions:
        seen = 0
    fresh = found[max(0, sent - seen) :]
    seen += len(found)
    request.extra[_KEY] = (request.num_preemptions, seen, max(sent, seen))
    return [TokenDelta(request.id, request.index, [], prompt_logprobs=fresh)] if fresh else []


def last_news(
    request: Request,
    eos: Collection[int],
    tokens: list[int],
    logprobs: list[TokenLogprobs] | None,
    *,
    error: str | None,
    complete: bool,
    refused: str | None,
) -> TokenDelta:
    """The last news of a request, whose `finish` is set."""
    stopped = request.finish is FinishReason.STOP and not complete and bool(tokens)
    return TokenDelta(
        request.id,
        request.index,
        tokens,
        logprobs,
        request.num_cached,
        request.finish,
        tokens[-1] if stopped and tokens[-1] not in eos else None,
        error,
        RequestTimes(request.spec.arrival, request.first_scheduled, request.first_token, time.monotonic()),
        request.num_preemptions,
        complete,
        refused,
    )
