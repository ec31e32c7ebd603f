"""Non-text parts of a chat's messages: marks replace them while the template renders the prompt."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

from octavo.core.errors import InvalidRequestError
from octavo.features import parts
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.literal import part_of

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class PartKind:
    """A type of parts that a feature reads.

    Attributes:
        field: of a part, with its data.
        key: of a prompt object with such parts.
        shown_as: the type under which chat templates know it; "" if they don't.
    """

    field: str
    key: str
    shown_as: str


@cache
def part_kinds() -> Mapping[str, PartKind]:
    """Return the types of parts that features read."""
    hooks = [module.TEXT for _, module in parts("text")]
    return {
        kind: PartKind(field, hook.prompt_fields[0], hook.shown_as.get(kind, ""))
        for hook in hooks
        for kind, field in hook.part_fields.items()
    }


@dataclass(frozen=True, slots=True)
class GivenPart:
    """A part as the client sent it, not parsed yet.

    Attributes:
        param: its field.
        kind: its type.
        data: the content of that field.
        part: the whole part.
    """

    param: str
    kind: str
    data: Any
    part: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A prompt in pieces: texts, and parts between them.

    Attributes:
        shown: parts that the template wrote in its own way; the texts have their places, in the same order.
    """

    pieces: list[str | GivenPart]
    shown: list[GivenPart] = field(default_factory=list)


@dataclass(slots=True)
class MessageParts:
    """The parts of one feature in one request. Their marks are random, so clients can't forge them.

    Attributes:
        unshown: types of parts that the model's template does not know, see `TextHook.unshown`.
    """

    key: str
    unshown: Collection[str] = ()
    _name: str = field(default_factory=lambda: f"octavo-part-{secrets.token_hex(8)}")
    _given: list[GivenPart] = field(default_factory=list)

    @property
    def given(self) -> Sequence[GivenPart]:
        """The parts in the order of the messages."""
        return self._given

    def mark(self, given: GivenPart) -> str:
        """Add a part; return the mark that replaces it."""
        self._given.append(given)
        return f"{self._name}-{len(self._given) - 1};"

    def shown(self, content: Any) -> Any:
        """Return a message's content for a template: in a list, parts of the type that it knows in place of marks that
        are a text of their own."""
        if not isinstance(content, list):
            return content
        kinds = {f"{self._name}-{n};": self._shown_as(given) for n, given in enumerate(self._given)}
        return [{"type": kind} if (kind := kinds.get(part.get("text"), "")) else part for part in content]

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
        unmarked = [given for number, given in enumerate(self._given) if number not in numbers]
        lost = next((given for given in unmarked if not self._shown_as(given)), None)
        if lost is not None:
            raise InvalidRequestError(
                f"The chat template leaves {lost.param} out of the prompt. Put it into another message.",
                param=lost.param,
            )
        pieces: list[str | GivenPart] = [texts[0]]
        for number, after in zip(numbers, texts[1:], strict=True):
            pieces += [self._given[number], after]
        mixture = Mixture([piece for piece in pieces if piece], unmarked)
        prompt = {"prompt": "".join(texts), self.key: mixture}
        return cast("Prompt", prompt)

    def _shown_as(self, given: GivenPart) -> str:
        return "" if given.kind in self.unshown else part_kinds()[given.kind].shown_as


def taken(messages: Sequence[M]) -> tuple[Sequence[M], MessageParts | None]:
    """Replace the features' parts in messages by marks; return the messages, and the parts or None if there are
    none."""
    found: MessageParts | None = None
    plain: list[Any] = list(messages) if isinstance(messages, Sequence) else []
    for number, message in enumerate(plain):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_kind_of, content)):
            continue
        texts = []
        for place, part in enumerate(content):
            if kind := _kind_of(part):
                found = found or MessageParts(kind.key)
                where, name = f"messages.{number}.content.{place}", part["type"]
                if kind.key != found.key:
                    raise InvalidRequestError(
                        f"{name} can't be combined with {found.given[0].kind}.", param=f"{where}.type", value=name
                    )
                given = GivenPart(f"{where}.{kind.field}", name, part.get(kind.field), part)
                part = {"type": "text", "text": found.mark(given)}
            texts.append(part)
        plain[number] = {**message, "content": texts}
    return (messages, None) if found is None else (plain, found)


def _kind_of(part: Any) -> PartKind | None:
    """Return the kind of a part that a feature reads; None for any other part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return part_kinds().get(kind) if isinstance(kind, str) else None
