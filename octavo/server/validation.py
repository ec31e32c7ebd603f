"""Conversion of pydantic's errors to one sentence that names the field, its value and the expected value."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from octavo.core.errors import InvalidRequestError

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of at most 64 bits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}

# (missing field, other field present in its place) -> remedy
_MISPLACED = {
    ("messages", "prompt"): "a chat has messages; send a prompt to /v1/completions",
    ("messages", "input"): "a chat has messages; send an input to /v1/responses",
    ("prompt", "messages"): "send messages to /v1/chat/completions",
    ("input", "messages"): "send messages to /v1/chat/completions, or as the input",
    ("input", "prompt"): "name the prompt input here, or send it to /v1/completions",
    ("function", "name"): 'in a chat a tool is {"type": "function", "function": {"name": ...}}',
}


def explain(exc: ValidationError) -> InvalidRequestError:
    """Convert the first error to an `InvalidRequestError`; wrong fields take precedence over missing ones."""
    findings = exc.errors(include_url=False)
    first = min(findings, key=lambda finding: finding["type"] == "missing")
    param = _dotted(first["loc"])
    value = first["input"]
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required; {_remedy(first['loc'][-1], value)}.", param=param)
    kinds = [one["type"] for one in findings if one["loc"][:-1] == first["loc"][:-1] and one["input"] is value]
    if len(kinds) > 1 and all(kind in _EXPECTED for kind in kinds):  # of a union: the last part is a type's name
        param = _dotted(first["loc"][:-1])
        wanted = " or ".join(_EXPECTED[kind] for kind in kinds)
        sentence = f"{param} must be {wanted}, got {kind_of(value)}."
    else:
        sentence = _sentence(param, first)
    if first["type"] != "value_error":  # pydantic's own name, which clients know
        sentence += f" [type={first['type']}]"
    return InvalidRequestError(sentence, param=param or None, value=value)


def _remedy(missing: int | str, body: Any) -> str:
    given = body if isinstance(body, dict) else {}
    remedies = (text for (name, other), text in _MISPLACED.items() if name == missing and other in given)
    return next(remedies, "add it to the request")


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def _sentence(param: str, finding: ErrorDetails) -> str:
    kind = finding["type"]
    context = finding.get("ctx", {})
    if kind == "value_error":
        cause = context["error"]
        if not isinstance(cause, InvalidRequestError):
            return f"{param}: {cause}"
        # Validators used for many fields do not have the field's name.
        return f"{param} {cause.message}" if cause.message.startswith("must ") else cause.message
    value = finding["input"]
    if kind == "literal_error":
        return f"{param} must be {context['expected']}, got {kind_of(value) if value is None else repr(value)}."
    if kind in _EXPECTED and isinstance(value, float):
        return f"{param} must be {_EXPECTED[kind]}, got {value}."
    if kind in _EXPECTED:
        return f"{param} must be {_EXPECTED[kind]}, got {kind_of(value)}."
    if kind in ("greater_than_equal", "greater_than"):
        return f"{param} must be at least {context.get('ge', context.get('gt'))}."
    if kind in ("less_than_equal", "less_than"):
        return f"{param} must be at most {context.get('le', context.get('lt'))}."
    if kind == "extra_forbidden":
        return f"{param} is not a known field; correct its name or leave it out."
    if kind == "string_too_long":
        return f"{param} must have at most {context['max_length']} characters, got {len(value)}."
    if kind == "too_short":
        return f"{param} must not be empty."
    if kind == "string_too_short":
        return f"{param} must not be an empty string."
    if kind == "string_pattern_mismatch":
        return f"{param} has invalid characters; it must match {context['pattern']}."
    return f"{param}: {finding['msg']}."


def _dotted(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc if part != "[key]")
