"""JSON schemas closed to properties that they do not name, of which a model would invent more and more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LITERAL = ("enum", "const", "default", "examples")
_BY_NAME = ("properties", "$defs", "definitions")
_JOINING = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas", "patternProperties", "propertyNames"})
_BESIDE = frozenset({"$ref", "anyOf", "oneOf"})


def closed(schema: dict[str, Any], *, everywhere: bool) -> dict[str, Any]:
    """The schema, in which objects hold only the properties that it names, unless it says `additionalProperties`.

    What is still possible is valid by the schema as it was. By default it stays open where it can't be seen that
    anything is: where schemas are joined, whose properties add up, and where more properties are asked for than named.

    Args:
        everywhere: close whatever names properties.
    """
    if not everywhere and any(map(_joins, _schemas(schema))):
        return schema
    made: dict[str, Any] = _closed(schema, everywhere)
    return made


def _joins(schema: dict[str, Any]) -> bool:
    return bool(_JOINING & schema.keys() or ("properties" in schema and _BESIDE & schema.keys()))


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """The schema, or those of a list, and all that are in them."""
    if isinstance(value, list):
        for one in value:
            yield from _schemas(one)
    elif isinstance(value, dict):
        yield value
        for key, one in value.items():
            if key not in _LITERAL:
                yield from _schemas(list(one.values()) if key in _BY_NAME and isinstance(one, dict) else one)


def _closed(value: Any, everywhere: bool) -> Any:
    if isinstance(value, list):
        return [_closed(one, everywhere) for one in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for key, one in value.items():
        if key in _BY_NAME and isinstance(one, dict):
            made[key] = {name: _closed(schema, everywhere) for name, schema in one.items()}
        else:
            made[key] = one if key in _LITERAL else _closed(one, everywhere)
    properties = made.get("properties")
    if isinstance(properties, dict) and (everywhere or _suffice(properties, made)):
        made.setdefault("additionalProperties", False)
    return made


def _suffice(properties: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether an object can have all that it must with these properties alone."""
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        bool(properties)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )
