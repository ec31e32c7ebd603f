"""Find the keywords for which a JSON schema can't be used, and leave them out.

llguidance reports one fault, without its place. So each schema in a faulty one is tried alone, and where that fails,
each of its keywords is left out in turn. Only faulty schemas cost this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.json_schema import alone, inner, mapped, target

_MAX_FAILED = 400
"""Most trials that fail, after which a schema counts as faulty as it is."""
_KEPT = frozenset(("title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$comment"))
_LAST = ("$ref", "allOf", "anyOf", "oneOf", "required", "additionalProperties", "items", "properties", "type")
"""Keywords that are left out only if the others are not at fault: they say most about the value."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A keyword for which a schema can't be used, and llguidance's reason. `path` is that of the schema around it."""

    path: str
    keyword: str
    value: Any
    reason: str


def mended(schema: dict[str, Any], error_of: Callable[[dict[str, Any]], str]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the schema without the keywords for which it can't be used, and these in order.

    Args:
        error_of: returns why a schema can't be used, or "".
    """
    root = copy.deepcopy(schema)
    found = _Mending(root, error_of)
    if error_of(root):
        for path, one in _targets(root):
            found.visit(one, path, follow=False)
        found.visit(root, "", follow=False)
        if error_of(root):
            found.visit(root, "", follow=True)
    return root, found.faults


def _targets(root: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the paths of all schemas to which others refer, and these."""
    found: dict[str, Any] = {}
    queue: list[Any] = [root]
    while queue:
        one = queue.pop()
        if isinstance(one, Mapping):
            queue.extend(part for _, part in inner(one))
            if (known := target(root, one.get("$ref"))) is not None and one["$ref"] not in found:
                found[one["$ref"]] = known
                queue.append(known)
    return [(reference.lstrip("#/").replace("/", "."), one) for reference, one in found.items()]


class _Mending:
    """Changes `root` in place.

    First references are ignored, as what they point to is visited by itself, and may refer back.
    """

    def __init__(self, root: dict[str, Any], error_of: Callable[[dict[str, Any]], str]) -> None:
        self.faults: list[Fault] = []
        self._root = root
        self._error_of = error_of
        self._failed = 0

    def visit(self, schema: Any, path: str, *, follow: bool) -> None:
        if not isinstance(schema, dict) or not self._error(schema, follow):
            return
        for place, one in inner(schema):
            self.visit(one, f"{path}.{place}" if path else place, follow=follow)
        while error := self._error(schema, follow):
            keyword = self._culprit(schema, follow)
            if keyword is None:
                return
            self.faults.append(Fault(path, keyword, schema.pop(keyword), error))

    def _culprit(self, schema: dict[str, Any], follow: bool) -> str | None:
        """Return the keyword without which the schema can be used, or else the first that may be at fault."""
        keywords = sorted(schema.keys() - _KEPT, key=lambda one: (_LAST.index(one) if one in _LAST else -1, one))
        for keyword in keywords:
            if not self._error({name: value for name, value in schema.items() if name != keyword}, follow):
                return keyword
        return keywords[0] if keywords else None

    def _error(self, schema: dict[str, Any], follow: bool) -> str:
        if self._failed > _MAX_FAILED:
            return ""
        error = self._error_of(alone(schema, self._root) if follow else self._cut(schema))
        self._failed += bool(error)
        return error

    def _cut(self, schema: Any) -> Any:
        """Return the schema without its references to others in the root."""
        if not isinstance(schema, Mapping):
            return schema
        known = target(self._root, schema.get("$ref")) is not None
        return mapped({name: one for name, one in schema.items() if not (known and name == "$ref")}, self._cut)
