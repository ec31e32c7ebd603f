"""Does an output go in circles?"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.params import RepetitionDetection


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
