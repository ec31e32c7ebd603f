"""Prompt lookup: the tokens that followed an earlier occurrence of a text's last tokens.

After Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding), and with a vote among all occurrences
(`voted`) after SuffixDecoding (https://arxiv.org/abs/2411.04975), whose suffix tree is an index of the same
occurrences. Here they are found by comparing the text with its end, which for 8k tokens takes tens of microseconds and
keeps no state that rejected drafts or preempted requests could make wrong.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
NOTHING: Tokens = np.empty(0, dtype=np.int32)


class Matches(NamedTuple):
    """The longest occurrences of a text's end in `text`.

    Attributes:
        text: the text that was searched.
        ends: indices in `text` of the last token of each occurrence, ascending.
        size: tokens that match, 0 if there are none.
    """

    text: Tokens
    ends: NDArray[np.intp]
    size: int


def longest(text: Tokens, known: Tokens, most: int) -> Matches:
    """Return where the longest end of `known`, up to `most` tokens, occurs in `text`.

    An occurrence at the end of `text` has no continuation and is not found.
    """
    most = min(most, len(known))
    ends = np.flatnonzero(text[:-1] == known[-1]) if most else np.empty(0, dtype=np.intp)
    size = min(len(ends), 1)
    while len(ends) > 1 and size < most:
        found = ends[ends >= size] if ends[0] < size else ends
        found = found[text[found - size] == known[-1 - size]]
        if not len(found):
            return Matches(text, ends, size)
        size, ends = size + 1, found
    if len(ends) == 1:
        size = _agreeing(text[: ends[0] + 1], known, most)
    return Matches(text, ends, size)


def _agreeing(text: Tokens, known: Tokens, most: int) -> int:
    """Return how many of the last tokens of two texts are the same, up to `most`; neither text is empty."""
    count = min(most, len(text), len(known))
    differs = (text[-count:] != known[-count:])[::-1]
    first = int(differs.argmax())
    return first if differs[first] else count


def last(matches: Matches, count: int) -> Tokens:
    """Return `count` tokens after the last occurrence; beyond the end of the text they repeat."""
    if not len(matches.ends):
        return NOTHING
    return np.resize(matches.text[matches.ends[-1] + 1 :], count)


def nearest(matches: Matches, place: int, count: int) -> Tokens:
    """Return up to `count` tokens after the occurrence that ends nearest to index `place`."""
    if not len(matches.ends):
        return NOTHING
    end = matches.ends[np.abs(matches.ends - place).argmin()]
    return matches.text[end + 1 : end + 1 + count]


def voted(matches: Matches, count: int, least_chance: float) -> Tokens:
    """Return up to `count` tokens, each the most frequent one after the occurrences that agree so far.

    Args:
        least_chance: stop before the product of these frequencies is less.
    """
    chosen: list[int] = []
    ends, chance = matches.ends, 1.0
    for ahead in range(1, count + 1):
        if len(ends) == 1:  # no more to vote about
            rest = matches.text[ends[0] + 1 :]
            rest = rest[:count] if len(rest) >= count else np.resize(rest, count)
            return np.array([*chosen, *rest[ahead - 1 :].tolist()], dtype=np.int32)
        ends = ends[ends + ahead < len(matches.text)]
        if not len(ends):
            break
        following = matches.text[ends + ahead]
        votes = Counter(following[::-1].tolist())
        token = max(votes, key=votes.__getitem__)  # of equally frequent ones the last
        chance *= votes[token] / len(ends)
        if chance < least_chance:
            break
        chosen.append(token)
        ends = ends[following == token]
    return np.array(chosen, dtype=np.int32)
