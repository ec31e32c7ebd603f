"""Non-text parts of a chat's messages: marks replace them while the template renders the prompt."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

from octavo.core.errors import InvalidRequestError
from octavo.features import parts
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.literal import part_of

M = TypeVar("M")


@cache
def part_types() -> frozenset[str]:
    """Return the types of parts that features read; each is also the key of a prompt object with such parts."""
    return frozenset(kind for _, module in parts("text") for kind in module.TEXT.prompt_fields)


@dataclass(frozen=True, slots=True)
class GivenPart:
    """A part as the client sent it, not parsed yet; `param` is its field."""

    param: str
    data: Any


@dataclass(frozen=True, slots=True)
class Mixture:
    """A prompt in pieces: texts, and parts between them."""

    pieces: list[str | GivenPart]


@dataclass(slots=True)
class MessageParts:
    """The parts of one type in one request. Their marks are random, so clients can't forge them."""

    kind: str
    _name: str = field(default_factory=lambda: f"octavo-part-{secrets.token_hex(8)}")
    _given: list[GivenPart] = field(default_factory=list)

    def mark(self, given: GivenPart) -> str:
        """Add a part; return the mark that replaces it."""
        self._given.append(given)
        return f"{self._name}-{len(self._given) - 1};"

    def prompt(self, text: str) -> Prompt:
        """Return the rendered text with the parts in place of their marks.

        Raises:
            InvalidRequestError: the template has dropped a part.
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
        pieces: list[str | GivenPart] = [texts[0]]
        for number, after in zip(numbers, texts[1:], strict=True):
            pieces += [self._given[number], after]
        prompt = {"prompt": "".join(texts), self.kind: Mixture([piece for piece in pieces if piece])}
        return cast("Prompt", prompt)


def taken(messages: Sequence[M]) -> tuple[Sequence[M], MessageParts | None]:
    """Replace the features' parts in messages by marks; return the messages, and the parts or None if there are
    none."""
    found: MessageParts | None = None
    plain: list[Any] = list(messages) if isinstance(messages, Sequence) else []
    for number, message in enumerate(plain):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_type_of, content)):
            continue
        texts = []
        for place, part in enumerate(content):
            if kind := _type_of(part):
                found = found or MessageParts(kind)
                if kind != found.kind:
                    param = f"messages.{number}.content.{place}.type"
                    raise InvalidRequestError(f"{kind} can't be combined with {found.kind}.", param=param, value=kind)
                given = GivenPart(f"messages.{number}.content.{place}.data", part.get("data"))
                part = {"type": "text", "text": found.mark(given)}
            texts.append(part)
        plain[number] = {**message, "content": texts}
    return (messages, None) if found is None else (plain, found)


def _type_of(part: Any) -> str | None:
    """Return the type of a part that a feature reads; None for any other part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) and kind in part_types() else None
