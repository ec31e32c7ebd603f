"""Tool schemas with type names of programming languages and databases: `float`, `dict`, `varchar(20)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.core.json_schema import mapped

_MEANT = {
    "string": "str text char varchar date datetime time uuid uri url bytes",
    "integer": "int uint long bigint smallint tinyint short byte unsigned",
    "number": "float double decimal real numeric num",
    "boolean": "bool",
    "object": "dict map mapping struct json",
    "array": "list tuple set arr sequence",
    "null": "none nil nonetype void",
}
_ANY = "any"
_JSON = {other: name for name, others in _MEANT.items() for other in (name, *others.split())} | {_ANY: _ANY}
_WORD = re.compile(r"[a-z]+")


def json_types(schema: Any) -> Any:
    """Return the schema with JSON's type names. Unknown names are unchanged, and `any` is removed.

    A property may be only the name of its type. Types in capitals and with arguments, such as `VARCHAR(20)`
    and `List[int]`, are recognized by their first word.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = mapped(schema, json_types)
    if "type" in made:
        made["type"] = _types(made["type"])
        if made["type"] == _ANY or (isinstance(made["type"], list) and _ANY in made["type"]):
            del made["type"]
    if isinstance(made.get("properties"), Mapping):
        made["properties"] = {name: _as_schema(one) for name, one in made["properties"].items()}
    return made


def _as_schema(given: Any) -> Any:
    """Return a property's schema, also if only its type is given; any value if it is no schema."""
    if isinstance(given, str):
        return json_types({"type": given})
    return given if isinstance(given, Mapping | bool) else {}


def _types(given: Any) -> Any:
    """Convert one type or several."""
    if isinstance(given, str):
        word = _WORD.match(given.lower())
        return _JSON.get(word.group(), given) if word else given
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        return list(dict.fromkeys(_types(one) for one in given))
    return given
