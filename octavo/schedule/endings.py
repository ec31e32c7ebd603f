"""When an output ends by itself: at a stop token, at its limit, or because it goes in circles."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.output import FinishReason
from octavo.core.request import Request
from octavo.schedule.repetition import repeats


def append(request: Request, sampled: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Append tokens to the request up to its end; those appended, and the end if one was met."""
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
