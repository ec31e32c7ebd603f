"""Numbers in the schemas of tools: what is no bound is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.json_schema import with_plain_counts
from octavo.text.tools.bounds import check_bounds


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"minLength": 5, "maxLength": 3}, "minLength 5 and maxLength 3 in properties.a; no value fits both"),
        ({"maxLength": None}, "maxLength null in properties.a; it must be a whole number that is not negative"),
        ({"maxItems": "3"}, 'maxItems "3" in properties.a'),
        ({"minProperties": -1}, "minProperties -1 in properties.a"),
        ({"minLength": 1.5}, "minLength 1.5 in properties.a"),
        ({"maxLength": True}, "maxLength true in properties.a"),
        ({"minLength": 10**12}, "minLength 1000000000000 in properties.a; it must be at most"),
        ({"minimum": 2, "maximum": 1.5}, "minimum 2 and maximum 1.5 in properties.a"),
        ({"minimum": None}, "minimum null in properties.a; it must be a number"),
        ({"anyOf": [{"type": "null"}, {"items": {"maxLength": []}}]}, r"maxLength \[\] in properties.a.anyOf.1.items"),
    ],
)
def test_a_wrong_bound_is_named(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"The schema of the function 'f' has {said}") as caught:
        check_bounds({"type": "object", "properties": {"a": schema}}, "f", "tools.0.function.parameters")
    assert caught.value.param == "tools.0.function.parameters"


def test_right_bounds_and_names_like_bounds_pass() -> None:
    schema = {"minLength": 5.0, "maxLength": 2**63, "minimum": -1.5, "enum": [{"maxLength": None}]}
    check_bounds({"properties": {"maxLength": schema, "minimum": True}, "minProperties": 0}, "f", "tools")


def test_counts_become_integers_within_reach() -> None:
    given = {"minLength": 5.0, "maxLength": 2**63, "items": {"maxItems": 3.0}, "properties": {"maxLength": {}}}
    assert with_plain_counts(given) == {"minLength": 5, "items": {"maxItems": 3}, "properties": {"maxLength": {}}}
    assert isinstance(with_plain_counts(given)["minLength"], int)
