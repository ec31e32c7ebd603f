"""Token ids to text, one by one, never giving out half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.text.tokenizers.tokenizer import Tokenizer

# Most tokens need one or two neighbours to show their text; longer waits mean bytes that never become a character.
_MAX_WINDOW = 16


class Detokenizer:
    """The text of one growing sequence. The pieces joined are `tokenizer.decode` of all ids.

    A token costs the same however long the sequence is. Bytes that begin a character are kept until it is whole; bytes
    that can't be part of one come out as U+FFFD.

    Args:
        skip_special_tokens: leave special tokens out.
        after_text: the sequence continues a text, so a space at its beginning belongs to it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = 0 if after_text else tokenizer.decoding.strip
        self._window = None if tokenizer.decoding.concatenates else _Window(tokenizer, skip_special_tokens)

    def push(self, token: int) -> str:
        """The text that this token completes; often all of its own, sometimes none."""
        if self._window is not None:
            return self._window.push(token)
        if token in self._skipped:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token))
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """What was held back, at the end of the sequence: U+FFFD for an unfinished character, mostly nothing."""
        if self._window is not None:
            return self._window.flush()
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        """Without the spaces that the tokenizer itself puts at the beginning of a text."""
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class _Window:
    """For tokenizers whose text is not a concatenation: decodes the last few tokens with and without the new one.

    `_ids[: _read]` is text that was given out; it stays as the context in which new tokens are decoded.
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
