"""When an output ends by itself: at a stop token, at its limit, or because it goes in circles."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.output import FinishReason
from octavo.core.params import RepetitionDetection
from octavo.core.request import Request


def append(request: Request, sampled: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Append tokens to the request up to its end; those appended, and the end if one was met."""
    tokens: list[int] = []
    rule = request.params.repetition_detection
    for token in sampled:
        request.tokens.append(token)
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, FinishReason.STOP
        if rule is not None and repeats(request.tokens[request.num_prompt :], rule):
            return tokens, FinishReason.REPETITION
        if request.num_output >= request.max_tokens:
            return tokens, FinishReason.LENGTH
    return tokens, None


def repeats(tokens: Sequence[int], rule: RepetitionDetection) -> bool:
    """Whether the tokens end with one pattern `min_count` times over, of a length that the rule names."""
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        length = size * rule.min_count
        if length > len(tokens):
            return False
        tail = tokens[len(tokens) - length :]
        if all(tail[i] == tail[i + size] for i in range(length - size)):
            return True
    return False
