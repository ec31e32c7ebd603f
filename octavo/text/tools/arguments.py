"""The arguments that a function takes by its schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.text.tools.tool import Tool


def arguments_of(tool: Tool) -> tuple[dict[str, Any], set[str]]:
    """Return argument -> its schema, and the required ones."""
    return with_required(tool.parameters), set(_required(tool.parameters))


def with_required(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return property -> its schema. A required property that is not declared may be any value."""
    return _declared(schema) | {name: {} for name in undeclared(schema)}


def undeclared(schema: Mapping[str, Any]) -> list[str]:
    """Return the required properties that are not declared."""
    declared = _declared(schema)
    return [name for name in _required(schema) if name not in declared]


def _declared(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return dict(properties) if isinstance(properties, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
