"""When an output goes in circles."""

from __future__ import annotations

from octavo.core.params import RepetitionDetection


def repeats(tokens: list[int], rule: RepetitionDetection, start: int = 0) -> bool:
    """Whether `tokens[start:]` end with one pattern over and over, as the rule says.

    Cheap before `rule.least` tokens; from then on only earlier places of the last token are compared.
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
