"""Incremental search for the end of JSON values, and for marks, in text that arrives in pieces."""

from __future__ import annotations


class ObjectScan:
    """Finds the end of a JSON object."""

    __slots__ = ("_depth", "_escaped", "_quoted", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def take(self, text: str) -> int:
        """Return how many characters of `text` belong to the object."""
        for place, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.complete = True
                    return place + 1
        return len(text)


class ValueScan:
    """Finds the end of any JSON value.

    Attributes:
        scalar: the value is a number or a word, whose end is known only from the next character.
    """

    __slots__ = ("_escaped", "_inner", "_quoted", "complete", "scalar")

    def __init__(self) -> None:
        self.complete = False
        self.scalar = False
        self._inner: ObjectScan | None = None
        self._quoted = False
        self._escaped = False

    def take(self, text: str) -> int:
        """Return how many characters of `text` belong to the value."""
        if self.complete or not text:
            return 0
        if not (self.scalar or self._quoted or self._inner):
            if text[0] in "{[":
                self._inner = ObjectScan()
            elif text[0] == '"':
                self._quoted = True
                return 1 + self._string(text[1:])
            else:
                self.scalar = True
        if self._inner is not None:
            length = self._inner.take(text)
            self.complete = self._inner.complete
            return length
        return self._string(text) if self._quoted else self._word(text)

    def _string(self, text: str) -> int:
        for place, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.complete = True
                return place + 1
        return len(text)

    def _word(self, text: str) -> int:
        length = next((place for place, char in enumerate(text) if not (char.isalnum() or char in "+-._")), None)
        self.complete = length is not None
        return len(text) if length is None else length


def begun(text: str, mark: str) -> int:
    """Return the length of the suffix of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[len(text) - n :])), 0)
