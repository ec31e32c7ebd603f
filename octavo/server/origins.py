"""`Origins`: the fields of a request that became a chat of another form, for errors about that chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.core.errors import InvalidRequestError

_NUMBER = re.compile(r"\.(\d+)")


class Origins:
    """Notes where messages, their parts and their calls come from, while a request is converted."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[dict[str, Any], str, Mapping[str, str]]] = {}

    def note(self, made: dict[str, Any], place: str, fields: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Note the place of a message, of a part or of a call, and return it.

        Args:
            fields: of it -> those that the client sent, below its place.
        """
        self._places[id(made)] = made, place, fields or {}
        return made

    def names(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return fields of the chat with these messages, such as messages.0.content.1 -> the client's."""
        found: dict[str, str] = {}
        for number, message in enumerate(messages):
            where = f"messages.{number}"
            found |= self._of(message, where)
            for name in ("content", "tool_calls"):
                listed = message.get(name)
                for place, one in enumerate(listed if isinstance(listed, list) else []):
                    found |= self._of(one, f"{where}.{name}.{place}")
        return found

    def _of(self, made: Any, where: str) -> dict[str, str]:
        if id(made) not in self._places:
            return {}
        _, place, fields = self._places[id(made)]
        return {where: place} | {f"{where}.{name}": f"{place}.{own}" for name, own in fields.items()}


@contextmanager
def in_names(names: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Give errors about a chat the names of the fields that the client sent.

    Args:
        names: returns them; called only if there is an error. The longest that fits holds.
    """
    try:
        yield
    except InvalidRequestError as exc:
        found = dict(names())
        found |= {_NUMBER.sub(r"[\1]", chat): _NUMBER.sub(r"[\1]", own) for chat, own in found.items()}
        if not found:
            raise
        longest = sorted(found, key=len, reverse=True)
        pattern = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, longest))})(?!\w)")
        param = pattern.sub(lambda match: found[match[0]], exc.param or "")
        message = pattern.sub(lambda match: found[match[0]], exc.message)
        if (message, param) == (exc.message, exc.param or ""):
            raise
        raise type(exc)(message, param=param, value=exc.value) from None
