"""Arguments written one by one, each between its own marks, and their streaming conversion to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.text.tools.scan import ValueScan, begun

ValueKind = Literal["text", "nullable", "json"]
"""How a value is written: as plain text, as plain text or `null`, or as JSON."""

# Keywords allowed in the schema of a string that is written without quotes.
_PLAIN = {
    "type",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "enum",
    "const",
    "minLength",
    "maxLength",
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_COMPOSED = frozenset(("$ref", "allOf", "not", "if"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """An argument is `key_open NAME key_close VALUE value_close`; `separator` is between two arguments.

    Attributes:
        raw: strings are written without quotes; otherwise all values are JSON, or Python's True, False and None.
    """

    key_open: str
    key_close: str
    value_close: str
    separator: str = ""
    raw: bool = True

    def write(self, arguments: str) -> str:
        """Return a JSON object in this form; other text unchanged."""
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(value, dict):
            return arguments
        return self.separator.join(
            self.key_open + name + self.key_close + self._value(one) + self.value_close for name, one in value.items()
        )

    def _value(self, value: Any) -> str:
        if self.raw and isinstance(value, str):
            return value
        if not self.raw and (value is None or isinstance(value, bool)):
            return str(value)
        return json.dumps(value, ensure_ascii=False)

    def kind(self, schema: Any) -> ValueKind:
        """Return how a value of this JSON schema is written."""
        if not self.raw or not isinstance(schema, Mapping):
            return "json"
        inner, nullable = without_null(schema)
        words = words_of(inner)
        plain = inner.get("type") == "string" if words is None else all(isinstance(word, str) for word in words)
        close = self.value_close
        clean = words is None or (words and all(f"{word}{close}".find(close) == len(str(word)) for word in words))
        if not (plain and clean and inner.keys() <= _PLAIN):
            return "json"
        return "nullable" if nullable else "text"


def python_words_of(schema: Any) -> list[str]:
    """Return which of Python's True, False and None stand for values of this schema, as far as that is plain."""
    return [word for word, name in _PYTHON_WORDS.items() if _allows(schema, json.loads(name))]


def _allows(schema: Any, value: bool | None) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    words = words_of(schema)
    if words is not None:
        return any(word is value for word in words)
    kind = schema.get("type", [])
    kinds = kind if isinstance(kind, list) else [kind]
    some, single = (schema.get(keyword) for keyword in ("anyOf", "oneOf"))
    return (
        (not kinds or ("null" if value is None else "boolean") in kinds)
        and (not isinstance(some, list) or any(_allows(one, value) for one in some))
        and (not isinstance(single, list) or sum(_allows(one, value) for one in single) == 1)
        and not _COMPOSED & schema.keys()
    )


def without_null(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the schema of values other than null, and whether null is allowed."""
    kind = schema.get("type")
    if isinstance(kind, list) and len(kind) == 2 and "null" in kind:
        (other,) = [one for one in kind if one != "null"] or ["null"]
        return {**schema, "type": other}, True
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list) and len(options) == 2 and {"type": "null"} in options:
            other = next((one for one in options if one != {"type": "null"}), None)
            if isinstance(other, Mapping):
                return {**{key: value for key, value in schema.items() if key != name}, **other}, True
    return schema, False


def words_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only allowed values; None if the schema does not list them."""
    if "const" in schema:
        return [schema["const"]]
    words = schema.get("enum")
    return words if isinstance(words, list) else None


class KeyedReader:
    """Converts the arguments of one call to JSON.

    Attributes:
        complete: the end of the call was found; it is left in the text.

    Args:
        call_close: the end of a call.
        kinds: how the values of known arguments are written; None stands for the others. If it is missing, they are
            text, or JSON if the form has no text.
    """

    def __init__(self, form: Keyed, call_close: str, kinds: Mapping[str | None, ValueKind]) -> None:
        self.complete = False
        self._form = form
        self._close = call_close
        self._kinds = kinds
        self._count = 0
        self._in_value = False
        self._kind: ValueKind = "json"
        self._opened = False
        self._scan = ValueScan()
        self._scalar = ""

    def take(self, text: str) -> tuple[str, int]:
        """Return the JSON that is certain now, and the number of characters of `text` consumed."""
        said, taken = "", 0
        while not self.complete:
            inside = self._in_value
            more, length = self._value(text[taken:]) if inside else self._between(text[taken:])
            said, taken = said + more, taken + length
            if not length and inside is self._in_value:
                break
        return said, taken

    def _between(self, text: str) -> tuple[str, int]:
        """Read before a key, or before the end."""
        if text.startswith(self._close):
            self.complete = True
            return ("}" if self._count else "{}"), 0
        form = self._form
        lead = (form.separator if self._count else "") + form.key_open
        if self._close.startswith(text) or len(text) < len(lead):
            return "", 0
        name = self._name(text[len(lead) :])
        if name is None:
            return "", 0
        self._kind = self._kinds.get(name) or self._kinds.get(None, "text" if form.raw else "json")
        self._in_value, self._opened, self._scan, self._scalar = True, False, ValueScan(), ""
        opening = ", " if self._count else "{"
        self._count += 1
        return f"{opening}{json.dumps(name, ensure_ascii=False)}: ", len(lead) + len(name) + len(form.key_close)

    def _name(self, text: str) -> str | None:
        """Return the name at the start of the text; None if more is needed. Known names may contain `key_close`."""
        ends = [name + self._form.key_close for name in self._kinds if name is not None]
        if any(end.startswith(text) and end != text for end in ends):
            return None
        known = max((end for end in ends if text.startswith(end)), key=len, default="")
        place = len(known) - len(self._form.key_close) if known else text.find(self._form.key_close)
        return None if place < 0 else text[:place]

    def _value(self, text: str) -> tuple[str, int]:
        return self._json(text) if self._kind == "json" else self._text(text)

    def _text(self, text: str) -> tuple[str, int]:
        close = self._form.value_close
        place = text.find(close)
        if self._kind == "nullable" and not self._opened:
            if text[: max(place, 0)] == "null" and place >= 0:
                self._in_value = False
                return "null", place + len(close)
            if place < 0 and ("null" + close).startswith(text):
                return "", 0
        part = text[:place] if place >= 0 else text[: len(text) - begun(text, close)]
        said = ("" if self._opened or not (part or place >= 0) else '"') + _escaped(part)
        self._opened = self._opened or bool(part)
        if place < 0:
            return said, len(part)
        self._in_value = False
        return said + '"', place + len(close)

    def _json(self, text: str) -> tuple[str, int]:
        scan = self._scan
        length = scan.take(text)
        part = text[:length]
        if scan.scalar and not self._form.raw:  # it may be a Python constant
            self._scalar += part
            part = ""
        if not scan.complete:
            return part, length
        close = len(self._form.value_close)
        if len(text) < length + close:
            return part, length
        self._in_value = False
        return part + _PYTHON_WORDS.get(self._scalar, self._scalar), length + close


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
