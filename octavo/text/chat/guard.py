"""`ContentGuard`: text in a message that spells a special token stays text in any template.

Before rendering, a mark is inserted after the first character of each such text. After rendering, the marks are removed
and their positions are known. Marks are random, so requests can't forge them. They consist of digits, so that templates
which write contents as JSON or Python literals leave them unchanged.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from octavo.text.chat.messages import CallArguments
from octavo.text.tokenizers.literal import LiteralText, SpecialTokens


class ContentGuard:
    """The marks of one rendering.

    Args:
        special: the tokens to look for; None allows special tokens in contents.
    """

    def __init__(self, special: SpecialTokens | None) -> None:
        self._special = special
        self._mark = f"{secrets.randbelow(10**20):020}"
        self._used = False

    def mark(self, value: Any) -> Any:
        """Return a value (text, list or object, of any depth) with marks; the same object if there is nothing to mark.

        Text that is already marked is not marked again.
        """
        if self._special is None or not any(map(self._special.may_occur, _texts(value))):
            return value
        return self._marked(value)

    def read(self, prompt: str) -> str:
        """Remove the marks from a rendered prompt. Return a `LiteralText` if it spells special tokens."""
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
            marked = {self._marked(key): self._marked(one) for key, one in value.items()}
            return CallArguments(marked) if isinstance(value, CallArguments) else marked
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
        """Mark a list, also where a template that joins adjacent parts would form a special token."""
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
    """Return whether a mark was inside the span, or after its only character."""
    begin, end = span
    after = bisect_right(marks, begin)
    return after < len(marks) and marks[after] < max(end, begin + 2)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, including keys; adjacent parts of a content also joined."""
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
