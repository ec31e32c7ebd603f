"""Tool schemas with type names of programming languages and databases: `float`, `dict`, `varchar(20)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
# Keywords whose values contain schemas: by name, in a list, or alone.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


def json_types(schema: Any) -> Any:
    """Return the schema with JSON's type names. Unknown names are unchanged, and `any` is removed.

    Types in capitals and with arguments, such as `VARCHAR(20)` and `List[int]`, are recognized by their first word.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if "type" in made:
        made["type"] = _types(made["type"])
        if made["type"] == _ANY or (isinstance(made["type"], list) and _ANY in made["type"]):
            del made["type"]
    for name in _NAMED:
        if isinstance(made.get(name), Mapping):
            made[name] = {key: json_types(one) for key, one in made[name].items()}
    for name in _LISTED:
        if isinstance(made.get(name), list):
            made[name] = [json_types(one) for one in made[name]]
    for name in _ALONE:
        if isinstance(made.get(name), Mapping):
            made[name] = json_types(made[name])
    return made


def _types(given: Any) -> Any:
    """Convert one type or several."""
    if isinstance(given, str):
        word = _WORD.match(given.lower())
        return _JSON.get(word.group(), given) if word else given
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        return list(dict.fromkeys(_types(one) for one in given))
    return given
