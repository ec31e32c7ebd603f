"""Embeddings among the parts of a chat's messages: marks stand for them until the template has written the prompt."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.core.errors import InvalidRequestError
from octavo.text.prompts.prompt import EmbedsPrompt
from octavo.text.tokenizers.literal import part_of

KIND = "prompt_embeds"
"""The parts' type; their `data` is what `EmbedsPrompt` takes."""

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class GivenEmbeds:
    """What a client gave, not yet read; `param` says where."""

    param: str
    data: Any


@dataclass(frozen=True, slots=True)
class Mixture:
    """A prompt in pieces: texts, and embeddings between them."""

    pieces: list[str | GivenEmbeds]


class EmbedParts:
    """Those of one request. Nobody can know its marks beforehand, so no text that a client writes is taken for one."""

    def __init__(self) -> None:
        self._name = f"octavo-embeds-{secrets.token_hex(8)}"
        self._given: list[GivenEmbeds] = []

    def mark(self, given: GivenEmbeds) -> str:
        """The text to put in its place."""
        self._given.append(given)
        return f"{self._name}-{len(self._given) - 1};"

    def prompt(self, text: str) -> EmbedsPrompt:
        """What a template wrote, with the embeddings in the places of their marks.

        Raises:
            InvalidRequestError: the template has left one out.
        """
        texts: list[str] = []
        numbers: list[int] = []
        at = 0
        for found in re.finditer(rf"{self._name}-(\d+);", text):
            texts.append(part_of(text, at, found.start()))
            numbers.append(int(found[1]))
            at = found.end()
        texts.append(part_of(text, at, len(text)))
        lost = next((given for number, given in enumerate(self._given) if number not in numbers), None)
        if lost is not None:
            raise InvalidRequestError(
                f"The chat template leaves {lost.param} out of the prompt. Put it into another message.",
                param=lost.param,
            )
        pieces: list[str | GivenEmbeds] = [texts[0]]
        for number, after in zip(numbers, texts[1:], strict=True):
            pieces += [self._given[number], after]
        return {"prompt": "".join(texts), "prompt_embeds": Mixture([piece for piece in pieces if piece])}


def taken(messages: Sequence[M]) -> tuple[Sequence[M], EmbedParts | None]:
    """Messages with marks in place of embeddings, and these; the same messages and None where there are none."""
    parts: EmbedParts | None = None
    plain: list[Any] = list(messages) if isinstance(messages, Sequence) else []
    for number, message in enumerate(plain):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_embeds, content)):
            continue
        parts = parts or EmbedParts()
        texts = []
        for place, part in enumerate(content):
            if _is_embeds(part):
                given = GivenEmbeds(f"messages.{number}.content.{place}.data", part.get("data"))
                part = {"type": "text", "text": parts.mark(given)}
            texts.append(part)
        plain[number] = {**message, "content": texts}
    return (messages, None) if parts is None else (plain, parts)


def _is_embeds(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == KIND
