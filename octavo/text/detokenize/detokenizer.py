"""Incremental detokenization that never emits part of a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.text.tokenizers.tokenizer import Tokenizer

# Most tokens need one or two neighbours to show their text. Longer waits mean bytes that never become a character.
_MAX_WINDOW = 16


class Detokenizer:
    """The text of one growing sequence. The concatenated pieces equal `tokenizer.decode` of all ids.

    The cost per token is independent of the sequence's length. Bytes of an incomplete character are kept until it is
    complete; invalid bytes become U+FFFD.

    Args:
        skip_special_tokens: leave special tokens out.
        after_text: the sequence continues a text, so a leading space belongs to it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = 0 if after_text else tokenizer.decoding.strip
        self._window = None if tokenizer.decoding.concatenates else _Window(tokenizer, skip_special_tokens)

    def push(self, token: int) -> str:
        """Add a token. Return the text that is complete now, which may be empty."""
        if self._window is not None:
            return self._window.push(token)
        if token in self._skipped:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token))
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """Return the text held back at the end of the sequence: U+FFFD for an incomplete character, usually nothing."""
        if self._window is not None:
            return self._window.flush()
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        """Remove the leading spaces that the tokenizer itself inserts."""
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class _Window:
    """For tokenizers whose text is not a concatenation: decodes the last few tokens with and without the new one.

    The text of `_ids[: _read]` has been emitted; these ids are the context in which new tokens are decoded.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._read]), self._decode(self._ids)
        unfinished = now.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._read < _MAX_WINDOW
        if len(now) <= len(before) or unfinished:
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        text = self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]
        self._ids, self._read = [], 0
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
