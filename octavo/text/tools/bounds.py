"""Checks of the numbers in tool schemas, for errors that name the function, the place, the keyword and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.core.json_schema import COUNTS, MOST, inner, is_whole

_NUMBERS = (("minimum", "maximum"),)


def check_bounds(schema: Any, function: str, param: str, path: str = "") -> None:
    """Check all bounds in a function's schema.

    Raises:
        InvalidRequestError: one is not the number that it must be, or a lower bound exceeds the upper.
    """
    if not isinstance(schema, Mapping):
        return
    for low, high in (*COUNTS, *_NUMBERS):
        must = "a whole number that is not negative" if (low, high) in COUNTS else "a number"
        for keyword in (low, high):
            if keyword in schema and not (_is_count if (low, high) in COUNTS else _is_number)(schema[keyword]):
                told = f"{keyword} {_shown(schema[keyword])}", f"it must be {must}; correct it, or leave it out"
                raise _error(function, param, path, *told)
        if low in schema and high in schema and schema[low] > schema[high]:
            pair = f"{low} {_shown(schema[low])} and {high} {_shown(schema[high])}"
            raise _error(function, param, path, pair, "no value fits both; correct one of them")
        if (low, high) in COUNTS and schema.get(low, 0) > MOST:
            raise _error(
                function, param, path, f"{low} {_shown(schema[low])}", f"it must be at most {MOST:,}; correct it"
            )
    for place, one in inner(schema):
        check_bounds(one, function, param, f"{path}.{place}" if path else place)


def _error(function: str, param: str, path: str, what: str, remedy: str) -> InvalidRequestError:
    place = f" in {path}" if path else ""
    return InvalidRequestError(f"The schema of the function {function!r} has {what}{place}; {remedy}.", param=param)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."
