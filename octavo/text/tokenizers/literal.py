"""`LiteralText`: a prompt in which some text that spells a special token is text, and how it becomes token ids.

A tokenizer reads the text of a special token as that token wherever it stands. Here a copy of the tokenizer is used in
which special tokens have secret names; these names are written in place of the tokens that are meant. What is left of
the old names is text like any other, and all else (normalizers, splitting, spaces beside special tokens) is unchanged.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers.models import WordLevel

Span = tuple[int, int]


class LiteralText(str):
    """Text of a prompt with special tokens, some of which are only spelled.

    Attributes:
        literal: (begin, end) in characters of each special token's text that is text alone; in order.
    """

    __slots__ = ("literal",)
    literal: tuple[Span, ...]

    def __new__(cls, text: str, literal: Sequence[Span]) -> LiteralText:
        made = super().__new__(cls, text)
        made.literal = tuple(literal)
        return made

    def __getnewargs__(self) -> tuple[str, tuple[Span, ...]]:  # type: ignore[override]
        return str(self), self.literal


def part_of(text: str, begin: int, end: int) -> str:
    """`text[begin:end]`, in which literal spans stay literal. One that is cut spells no token any more."""
    if not isinstance(text, LiteralText):
        return text[begin:end]
    inside = [(low - begin, high - begin) for low, high in text.literal if begin <= low and high <= end]
    return LiteralText(text[begin:end], inside) if inside else str(text)[begin:end]


class SpecialTokens:
    """The special tokens of a tokenizer, found in texts as the tokenizer itself finds them.

    Attributes:
        tokens: text -> id.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.tokens = {token.content: number for number, token in added.items() if token.special}
        self._beginnings = {text[:2] for text in self.tokens}
        # A vocabulary of these tokens alone: whatever is between two of them is one unknown word.
        self._backend = tokenizers.Tokenizer(WordLevel({"": 0}, unk_token=""))
        for token in added.values():
            known = {"single_word": token.single_word, "normalized": False, "special": token.special}
            self._backend.add_tokens([tokenizers.AddedToken(token.content, **known)])

    def may_occur(self, text: str) -> bool:
        """Whether a search is worth its time."""
        return any(beginning in text for beginning in self._beginnings)

    def find(self, text: str) -> list[Span]:
        """(begin, end) of each special token's text, in order."""
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
        ends: where in `text` each name ends.
        shifts: characters that are there too many, before the first name and after each.
    """

    text: str
    ends: list[int]
    shifts: list[int]

    def original(self, place: int) -> int:
        """The place in the text that was renamed, of a place that is not within a name."""
        return place - self.shifts[bisect_right(self.ends, place)]


class LiteralEncoder:
    """Encodes `LiteralText`. The copy of the tokenizer is made when it is first needed, which takes half a second
    for a vocabulary of 49,152 tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        self._original = backend
        self._special = special
        secret = secrets.token_hex(8)
        self._names = {text: f"<octavo-{secret}-{number}>" for text, number in special.tokens.items()}

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer that knows special tokens by their secret names only."""
        state = json.loads(self._original.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._name(token["content"])
        _rename(state["model"], self._names)
        renamed = tokenizers.Tokenizer.from_str(json.dumps(state))
        renamed.no_truncation()
        renamed.no_padding()
        return renamed

    def renamed(self, text: LiteralText) -> Renamed:
        """The text with secret names for all special tokens but the literal ones."""
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
    """Rename tokens in a model's vocabulary; no merge makes or uses them any more."""
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
