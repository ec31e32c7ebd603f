"""Field types of request bodies: strict, with errors that name the expected type."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.validation import kind_of

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""An integer of 64 bits; pydantic's strict mode refuses booleans, floats and strings."""
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$")]
"""Written to the log, so it must not contain line breaks or control characters."""


def _texts(value: Any) -> list[str] | None:
    """Accept one text, or a list of them."""
    if value is None:
        return None
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise InvalidRequestError("must be a string or a list of strings.")


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
Texts = Annotated[list[str] | None, BeforeValidator(_texts), WithJsonSchema(_TEXTS)]


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias must be an object that maps token ids to numbers, got {kind_of(value)}.")
    return {_token_id(key): _bias(key, one) for key, one in value.items()}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 19):
        raise InvalidRequestError(f"logit_bias must have token ids (whole numbers) as its keys, got {key!r}.")
    return int(key)


def _bias(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"logit_bias of token {key} must be a number, got {kind_of(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequestError(f"logit_bias of token {key} must be in [-100, 100].") from None


LogitBias = Annotated[
    dict[int, float] | None,
    BeforeValidator(_logit_bias),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}),
]


Role = Annotated[str, Field(min_length=1, max_length=64)]
"""Any text here; `ChatTemplate.render` refuses roles that are neither common nor in the template."""


def _content(value: Any) -> str | list[str] | None:
    """Return a text, or the texts of parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"content must be a string or a list of parts, got {kind_of(value)}.")
    return [_part_text(number, part) for number, part in enumerate(value)] or ""


_TEXT_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}


def _part_text(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"content part {number} must be an object, got {kind_of(part)}.")
    kind = part.get("type", "text" if "text" in part else None)
    if kind is not None and not isinstance(kind, str):
        raise InvalidRequestError(f"content part {number} must have a string as its type, got {kind_of(kind)}.")
    if kind not in _TEXT_PARTS:
        raise UnsupportedError(f"content part {number} has type {kind!r}, but only text parts are read here.")
    field = _TEXT_PARTS[kind]
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequestError(f"content part {number} must hold a string in its field {field!r}.")
    return text


def _part_schema(kind: str) -> dict[str, Any]:
    properties = {"type": {"const": kind}, kind: {"type": "string"}}
    return {"type": "object", "properties": properties, "required": list(properties)}


_IMAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string"}, "detail": {"enum": ["auto", "low", "high", None]}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
"""A part that features read, which are taken out before a content is validated."""


Content = Annotated[
    str | list[str] | None,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [_part_schema("text"), _part_schema("refusal"), _IMAGE]}},
                {"type": "null"},
            ]
        }
    ),
]


def _saved_tensors(value: Any) -> list[str] | None:
    if value in (None, "", []):
        return None
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise InvalidRequestError("prompt_embeds must be a string (a tensor of torch.save, in base64) or a list of such.")


SavedTensors = Annotated[
    list[str] | None,
    BeforeValidator(_saved_tensors),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


PromptItem = str | list[int]


def _prompts(value: Any, name: str = "prompt") -> list[PromptItem]:
    """Return one entry per prompt: its text or its token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _all_ints(value):
            return [value]
        if all(isinstance(one, str) for one in value):
            return value
        if all(isinstance(one, list) and _all_ints(one) for one in value):
            return value
    if value == []:
        raise InvalidRequestError(f"{name} must not be empty.")
    raise InvalidRequestError(
        f"{name} must be a string, a list of strings, a list of token ids or a list of such lists."
    )


def _all_ints(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


_TOKENS = {"type": "array", "items": {"type": "integer"}}
_PROMPTS_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            _TOKENS,
            {"type": "array", "items": _TOKENS},
        ]
    }
)
PromptList = Annotated[list[Any], BeforeValidator(_prompts), _PROMPTS_SCHEMA]
Inputs = Annotated[list[Any], BeforeValidator(lambda value: _prompts(value, "input")), _PROMPTS_SCHEMA]
Items = Annotated[list[Any], BeforeValidator(lambda value: _prompts(value, "items")), _PROMPTS_SCHEMA]
