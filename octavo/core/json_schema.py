"""JSON schemas: which keywords hold schemas, and what references point to."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with an object of schemas."""
_DIRECT = (
    *("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else"),
)
"""Keywords with a schema or a list of schemas."""

_NAMES = ("$id", "$anchor")
COUNTS = (
    *(("minLength", "maxLength"), ("minItems", "maxItems")),
    *(("minProperties", "maxProperties"), ("minContains", "maxContains")),
)
"""Keywords that bound a number of things, from below and from above."""
MOST = 2**31 - 1
"""Nothing that is generated has more characters, items or properties."""


def inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, each with its path, such as `properties.a` or `anyOf.0`."""
    for keyword in _BY_NAME:
        if isinstance(found := schema.get(keyword), Mapping):
            for name, one in found.items():
                yield f"{keyword}.{name}", one
    for keyword in _DIRECT:
        found = schema.get(keyword)
        if isinstance(found, Mapping):
            yield keyword, found
        elif isinstance(found, list):
            for number, one in enumerate(found):
                yield f"{keyword}.{number}", one


def mapped(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the schema with each schema directly inside it replaced."""
    made = dict(schema)
    for keyword in _BY_NAME:
        if isinstance(found := made.get(keyword), Mapping):
            made[keyword] = {name: change(one) for name, one in found.items()}
    for keyword in _DIRECT:
        found = made.get(keyword)
        if isinstance(found, Mapping):
            made[keyword] = change(found)
        elif isinstance(found, list):
            made[keyword] = [change(one) for one in found]
    return made


def is_whole(value: Any) -> bool:
    """Return whether a number is an integer as JSON schemas define it: 5.0 is one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0


def with_plain_counts(schema: Any) -> Any:
    """Return the schema with counts such as 5.0 written as integers, and without upper bounds beyond reach."""
    if not isinstance(schema, Mapping):
        return schema
    made = mapped(schema, with_plain_counts)
    for low, high in COUNTS:
        for keyword in (low, high):
            if is_whole(made.get(keyword)):
                made[keyword] = int(made[keyword])
        if is_whole(made.get(high)) and made[high] > MOST:
            del made[high]
    return made


def target(root: Mapping[str, Any], reference: Any) -> Any:
    """Return the schema that a reference into `root` points to; None if there is none, or it points elsewhere."""
    if not isinstance(reference, str):
        return None
    base = root.get("$id")
    place = reference.removeprefix(base) if isinstance(base, str) else reference
    if place == "#":
        return root
    if place.startswith("#/"):
        return _at(root, [unquote(part).replace("~1", "/").replace("~0", "~") for part in place[2:].split("/")])
    return _anchored(root, unquote(place[1:])) if place.startswith("#") else None


def _at(node: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(node, Mapping):
            node = node.get(part)
        elif isinstance(node, list):
            node = node[int(part)] if part.isdecimal() and int(part) < len(node) else None
    return node


def _anchored(schema: Any, name: str) -> Any:
    queue = deque([schema])
    while queue:
        one = queue.popleft()
        if isinstance(one, Mapping):
            if one.get("$anchor") == name:
                return one
            queue.extend(part for _, part in inner(one))
    return None


def alone(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema inside `root` as one of its own, with definitions of all that it refers to."""
    names: dict[str, str] = {}

    def moved(one: Any) -> Any:
        if not isinstance(one, Mapping):
            return one
        made = mapped({key: part for key, part in one.items() if key not in _NAMES}, moved)
        reference = made.get("$ref")
        if isinstance(reference, str) and target(root, reference) is not None:
            made["$ref"] = f"#/$defs/{names.setdefault(reference, _unused(reference, names.values()))}"
        return made

    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = moved({key: one for key, one in schema.items() if key not in ("$defs", "definitions")})
    defined: dict[str, Any] = {}
    while len(defined) < len(names):
        for reference, name in list(names.items())[len(defined) :]:
            defined[name] = moved(target(root, reference))
    return made | {"$defs": defined} if defined else made


def _unused(reference: str, used: Collection[str]) -> str:
    """Return a name for a definition, after the last part of the reference to it."""
    last = re.sub(r"[^\w-]", "_", reference.rpartition("/")[2].lstrip("#")) or "root"
    return last if last not in used else f"{last}.{len(used)}"
