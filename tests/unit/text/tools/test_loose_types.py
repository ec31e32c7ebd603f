"""Types in the schemas of tools, as programming languages name them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.text.tools.loose import json_types

PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": ["string", "null"], "enum": ["int", None], "default": {"type": "float"}},
        "list": {"type": "array", "items": {"$ref": "#/$defs/a"}},
    },
    "required": ["type"],
    "additionalProperties": False,
    "$defs": {"a": {"anyOf": [{"type": "integer"}, True]}},
}


def test_a_json_schema_stays_as_it_is() -> None:
    assert json_types(PLAIN) == PLAIN


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("float", "number"),
        ("int64", "integer"),
        ("VARCHAR(20)", "string"),
        ("Dict[str, int]", "object"),
        ("bool", "boolean"),
        (["str", "None"], ["string", "null"]),
        (["int", "integer"], ["integer"]),
    ],
)
def test_other_names_of_types(given: Any, meant: Any) -> None:
    assert json_types({"type": given}) == {"type": meant}
    inside: dict[str, Any] = {"type": "dict", "properties": {"x": {"anyOf": [{"items": {"type": given}}]}}}
    read = json_types(inside)
    assert read == {"type": "object", "properties": {"x": {"anyOf": [{"items": {"type": meant}}]}}}
    assert inside["type"] == "dict"


def test_properties_may_be_only_types() -> None:
    given = {"properties": {"a": "string", "b": "List[int]", "c": None, "d": True, "e": {"properties": {"f": "any"}}}}
    kinds = {"a": {"type": "string"}, "b": {"type": "array"}, "c": {}, "d": True, "e": {"properties": {"f": {}}}}
    assert json_types(given) == {"properties": kinds}


@pytest.mark.parametrize("given", ["any", "Any", ["string", "any"]])
def test_any_type_is_none(given: Any) -> None:
    assert json_types({"type": given, "enum": ["a"]}) == {"enum": ["a"]}


@pytest.mark.parametrize("unknown", ["", "enumeration", ["string", "thing"], ["string", {}], 3, None])
def test_what_is_no_type_is_left_for_the_grammar_to_refuse(unknown: Any) -> None:
    assert json_types({"type": unknown}) == {"type": unknown}
