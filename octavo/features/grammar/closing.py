"""Close JSON schemas to undeclared properties, which a model might otherwise generate without end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LITERAL = ("enum", "const", "default", "examples")
_BY_NAME = ("properties", "$defs", "definitions")
_JOINING = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas", "patternProperties", "propertyNames"})
_BESIDE = frozenset({"$ref", "anyOf", "oneOf"})


def closed(schema: dict[str, Any], *, everywhere: bool) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` added to objects that don't set it.

    Every value it still allows is valid by the given schema. By default an object stays open where closing could
    leave no valid value: in combined schemas, whose properties add up, and where it requires undeclared properties.

    Args:
        everywhere: close every object that declares properties.
    """
    if not everywhere and any(map(_joins, _schemas(schema))):
        return schema
    made: dict[str, Any] = _closed(schema, everywhere)
    return made


def _joins(schema: dict[str, Any]) -> bool:
    return bool(_JOINING & schema.keys() or ("properties" in schema and _BESIDE & schema.keys()))


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema, or those of a list, and all schemas nested in them."""
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
    made: dict[str, Any] = {}
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
    """Return whether these properties alone can satisfy the object's requirements."""
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        bool(properties)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )
