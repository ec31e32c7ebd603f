"""What is told of a prompt's log-probabilities: each place once."""

from __future__ import annotations

from octavo.core.output import TokenDelta, TokenLogprobs
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
