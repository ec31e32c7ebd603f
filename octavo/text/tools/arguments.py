"""The arguments that a function takes by its schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.json_schema import target
from octavo.text.tools.keyed import words_of
from octavo.text.tools.tool import Tool

_SAID = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keywords that say nothing about the value."""
_MAX_PARTS, _MAX_STEPS = 1000, 8
"""Most parts of a schema to look into, and most references from one schema to the next."""


@dataclass(slots=True)
class Arguments:
    """The properties of an object, and those that it requires. Others have the schema `others`; None allows none."""

    properties: dict[str, Any] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    others: Any = None

    def add(self, properties: Mapping[str, Any]) -> None:
        """Add those that are not known yet."""
        self.properties |= {name: one for name, one in properties.items() if name not in self.properties}


def arguments_of(tool: Tool) -> Arguments:
    """Return all arguments, also those that parts of a composed schema declare.

    A reference to the schema of a single argument is replaced by that schema.
    """
    found = _Gathering(tool.parameters).declared(tool.parameters, ())
    others = tool.parameters.get("additionalProperties", False)
    found.others = {} if others is True else others if isinstance(others, Mapping) else None
    for name in sorted(found.required - found.properties.keys()):
        found.properties[name] = found.others or {}
    found.properties = {
        name: _resolved(one, tool.parameters)
        for name, one in found.properties.items()
        if one is not False or name in found.required
    }
    return found


def with_required(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return property -> its schema. A required property that is not declared may be any value."""
    return _properties(schema) | {name: {} for name in undeclared(schema)}


def undeclared(schema: Mapping[str, Any]) -> list[str]:
    """Return the required properties that are not declared."""
    declared = _properties(schema)
    return [name for name in _required(schema) if name not in declared]


class _Gathering:
    """Collects the arguments in the parts of a schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MAX_PARTS

    def declared(self, schema: Any, around: tuple[Any, ...]) -> Arguments:
        """Return the arguments of a schema. `around` are those that it is a part of: parts may refer to them."""
        self._left -= 1
        if not isinstance(schema, Mapping) or any(schema is one for one in around) or self._left < 0:
            return Arguments()
        found = Arguments(_properties(schema), set(_required(schema)))
        around = (*around, schema)
        for part in (target(self._root, schema.get("$ref")), *_listed(schema, "allOf")):
            one = self.declared(part, around)
            found.add(one.properties)
            found.required |= one.required
        for keyword in ("anyOf", "oneOf"):
            ways = [self.declared(part, around) for part in _listed(schema, keyword)]
            if ways:
                found.add(_either(ways))
                found.required |= set.intersection(*(one.required for one in ways))
        for keyword in ("then", "else"):
            found.add(self.declared(schema.get(keyword), around).properties)
        return found


def _either(ways: Iterable[Arguments]) -> dict[str, Any]:
    """Return the properties of all ways; one that several declare may be as any of them says."""
    schemas: dict[str, list[Any]] = {}
    for way in ways:
        for name, one in way.properties.items():
            known = schemas.setdefault(name, [])
            known.extend([one] if one not in known else [])
    return {name: _any_of(known) for name, known in schemas.items()}


def _any_of(schemas: list[Any]) -> Any:
    if len(schemas) == 1:
        return schemas[0]
    words = [words_of(one) if isinstance(one, Mapping) else None for one in schemas]
    listed = [word for some in words for word in some or ()]
    return {"anyOf": schemas} if None in words else {"enum": listed}


def _resolved(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """Return the schema without references at its top, where it consists of nothing else, or allows null beside it."""
    if not isinstance(schema, Mapping) or depth == _MAX_STEPS:
        return schema
    said = {name: one for name, one in schema.items() if name in _SAID}
    match {name: one for name, one in schema.items() if name not in _SAID}:
        case {"allOf": [one], **rest} if not rest and isinstance(one, Mapping):
            return _resolved({**one, **said}, root, depth + 1)
        case {"$ref": reference, **rest} if not rest and isinstance(one := target(root, reference), Mapping):
            return _resolved({**one, **said}, root, depth + 1)
        case {"anyOf": [_, _] as ways} if {"type": "null"} in ways:
            return {**schema, "anyOf": [_resolved(one, root, depth + 1) for one in ways]}
    return schema


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return dict(properties) if isinstance(properties, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
