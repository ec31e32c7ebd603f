"""`ContentGuard`: text in a message that spells a special token stays text, whatever a template does with it.

Before the template runs, each such text is broken by a mark behind its first character; after it has run, the marks are
taken out again and the places where they stood are known. Nobody can know a mark beforehand. It is made of digits, so
that templates which write contents as JSON, or as Python writes them, leave it as it is.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from octavo.text.tokenizers.literal import LiteralText, SpecialTokens


class ContentGuard:
    """For one rendering.

    Args:
        special: the tokens to look for; None lets contents hold special tokens.
    """

    def __init__(self, special: SpecialTokens | None) -> None:
        self._special = special
        self._mark = f"{secrets.randbelow(10**20):020}"
        self._used = False

    def mark(self, value: Any) -> Any:
        """The same value (text, list or object, to any depth) with marks; the value itself if there is nothing to mark.

        What is marked already is not marked again.
        """
        if self._special is None or not any(map(self._special.may_occur, _texts(value))):
            return value
        return self._marked(value)

    def read(self, prompt: str) -> str:
        """What a template made of marked values, without the marks: a `LiteralText` where it spells special tokens."""
        if not self._used or self._special is None:
            return prompt
        pieces = prompt.split(self._mark)
        text = "".join(pieces)
        marks = list(accumulate(map(len, pieces[:-1])))
        literal = [span for span in self._special.find(text) if _is_broken(span, marks)]
        return LiteralText(text, literal) if literal else text

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return self._list(value)
        return value

    def _text(self, text: str) -> str:
        assert self._special is not None
        at, pieces = 0, []
        for begin, _ in self._special.find(text):
            pieces.append(text[at : begin + 1])
            at = begin + 1
        self._used |= bool(pieces)
        return self._mark.join([*pieces, text[at:]])

    def _list(self, values: list[Any] | tuple[Any, ...]) -> list[Any]:
        """The list, marked also where a template that joins neighbouring parts would make a special token of them."""
        marked = [self._marked(one) for one in values]
        texts = [text for one in values if isinstance(one, Mapping) and isinstance(text := one.get("text"), str)]
        if len(texts) == len(values) > 1:
            assert self._special is not None
            joints = list(accumulate(len(one) for one in texts[:-1]))
            spans = self._special.find("".join(texts))
            for place, joint in enumerate(joints):
                if any(begin < joint < end for begin, end in spans):
                    marked[place]["text"] += self._mark
                    self._used = True
        return marked


def _is_broken(span: tuple[int, int], marks: list[int]) -> bool:
    """Whether a mark stood within the span, or behind its one character."""
    begin, end = span
    after = bisect_right(marks, begin)
    return after < len(marks) and marks[after] < max(end, begin + 2)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, keys included; neighbouring parts of a content also as one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
        if len(value) > 1:
            yield "".join(str(one.get("text", "")) for one in value if isinstance(one, Mapping))
