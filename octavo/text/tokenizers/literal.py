"""`LiteralText`: a prompt in which text that spells a special token may be plain text, and its tokenization.

A tokenizer parses the text of a special token as that token wherever it occurs. So a copy of the tokenizer is used in
which special tokens have secret names; intended tokens are replaced by these names before encoding. Remaining
occurrences of the original names are ordinary text. Everything else (normalizers, splitting, spaces beside special
tokens) is unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers.models import WordLevel

CharSpan = tuple[int, int]


class LiteralText(str):
    """Text of a prompt with special tokens, some of which are only spelled.

    Attributes:
        literal: (begin, end) in characters of each special token's text that is plain text; in order.
    """

    __slots__ = ("literal",)
    literal: tuple[CharSpan, ...]

    def __new__(cls, text: str, literal: Sequence[CharSpan]) -> LiteralText:
        made = super().__new__(cls, text)
        made.literal = tuple(literal)
        return made

    # `str` has one argument; `__new__` here has two.
    def __getnewargs__(self) -> tuple[str, tuple[CharSpan, ...]]:  # type: ignore[override]
        return str(self), self.literal


def part_of(text: str, begin: int, end: int) -> str:
    """Return `text[begin:end]`, in which literal spans stay literal. A span that is cut no longer spells a token."""
    if not isinstance(text, LiteralText):
        return text[begin:end]
    inside = [(low - begin, high - begin) for low, high in text.literal if begin <= low and high <= end]
    return LiteralText(text[begin:end], inside) if inside else str(text)[begin:end]


def framed(text: str, name: str, before: str, after: str) -> str:
    """Return a text with `before` and `after` around each special token `name`, except for literal ones."""
    literal = text.literal if isinstance(text, LiteralText) else ()
    pieces: list[str] = []
    spans: list[CharSpan] = []
    at = shift = 0
    for part in re.finditer(re.escape(name), text):
        begin, end = part.span()
        if (begin, end) in literal:
            continue
        pieces += [text[at:begin], before, name, after]
        spans += [(low + shift, high + shift) for low, high in literal if at <= low and high <= begin]
        shift += len(before) + len(after)
        at = end
    spans += [(low + shift, high + shift) for low, high in literal if at <= low]
    made = "".join([*pieces, text[at:]])
    return LiteralText(made, spans) if spans else made


def split_at(text: str, name: str) -> list[str]:
    """Split a text at each occurrence of a special token's text, except for literal ones."""
    literal = text.literal if isinstance(text, LiteralText) else ()
    found = [part.span() for part in re.finditer(re.escape(name), text) if part.span() not in literal]
    begins, ends = [0, *(end for _, end in found)], [*(begin for begin, _ in found), len(text)]
    return [part_of(text, begin, end) for begin, end in zip(begins, ends, strict=True)]


def joined(texts: Sequence[str]) -> str:
    """Concatenate texts, in which literal spans stay literal."""
    spans: list[CharSpan] = []
    at = 0
    for text in texts:
        if isinstance(text, LiteralText):
            spans += [(low + at, high + at) for low, high in text.literal]
        at += len(text)
    made = "".join(texts)
    return LiteralText(made, spans) if spans else made


class SpecialTokens:
    """The special tokens of a tokenizer, found in texts exactly as the tokenizer finds them.

    Attributes:
        tokens: text -> id.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.tokens = {token.content: number for number, token in added.items() if token.special}
        self._beginnings = {text[:2] for text in self.tokens}
        # A vocabulary of these tokens only: the text between two of them is one unknown word.
        self._backend = tokenizers.Tokenizer(WordLevel({"": 0}, unk_token=""))
        for token in added.values():
            known = {"single_word": token.single_word, "normalized": False, "special": token.special}
            self._backend.add_tokens([tokenizers.AddedToken(token.content, **known)])

    def may_occur(self, text: str) -> bool:
        """Return whether the text can contain a special token; a fast check before `find`."""
        return any(beginning in text for beginning in self._beginnings)

    def find(self, text: str) -> list[CharSpan]:
        """Return (begin, end) in characters of each special token's text, in order."""
        if not self.may_occur(text):
            return []
        try:
            found = self._backend.encode(text)
        except (TypeError, UnicodeEncodeError):  # half a surrogate pair, which the tokenizer refuses with a reason
            return []
        named = zip(found.tokens, found.offsets, strict=True)
        return [(begin, end) for token, (begin, end) in named if token in self.tokens and text[begin:end] == token]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A text with secret names.

    Attributes:
        ends: where each name ends in `text`, in characters.
        shifts: surplus characters before the first name and after each name.
    """

    text: str
    ends: list[int]
    shifts: list[int]

    def original(self, place: int) -> int:
        """Return the position in the original text for a position outside the names."""
        return place - self.shifts[bisect_right(self.ends, place)]


class LiteralEncoder:
    """Encodes `LiteralText`.

    The copy of the tokenizer is made on first use, which takes half a second for a vocabulary of 49,152 tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        self._original = backend
        self._special = special
        secret = secrets.token_hex(8)
        self._names = {text: f"<octavo-{secret}-{number}>" for text, number in special.tokens.items()}

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer that has special tokens only under their secret names."""
        state = json.loads(self._original.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._name(token["content"])
        _rename(state["model"], self._names)
        renamed = tokenizers.Tokenizer.from_str(json.dumps(state))
        renamed.no_truncation()
        renamed.no_padding()
        return renamed

    def renamed(self, text: LiteralText) -> Renamed:
        """Return the text with secret names for all special tokens except the literal ones."""
        literal = set(text.literal)
        pieces, ends, shifts, at, length = [], [], [0], 0, 0
        for begin, end in self._special.find(text):
            if (begin, end) in literal:
                continue
            name = self._name(text[begin:end])
            pieces += [text[at:begin], name]
            length += begin - at + len(name)
            ends.append(length)
            shifts.append(length - end)
            at = end
        return Renamed("".join([*pieces, text[at:]]), ends, shifts)

    def _name(self, token: str) -> str:
        return self._names.get(token, token)


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens in a model's vocabulary, and drop the merges that make or use them."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]


def _touches(merge: Any, names: dict[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
