"""Read the output constraint from any of the request fields in use.

`response_format` is OpenAI's, `structured_outputs` and `guided_*` are vLLM's new and old fields, `regex`, `ebnf` and
`json_schema` are SGLang's, `grammar`, `json_schema` and a `schema` of `json_object` llama.cpp's. They are alternatives,
so at most one may be set.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import FramePart, StructuredOutputsParams

# Request field -> the constraint that it sets.
_PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}


FIELDS = (*_PLAIN, "response_format", "structured_outputs", "guided_whitespace_pattern")
"""All fields of a body that can set a constraint."""


def output_form(body: Any, max_bytes: int) -> StructuredOutputsParams | None:
    """Return the request's output constraint, or None.

    Raises:
        InvalidRequestError: a field is malformed or too long, or two fields contradict each other.
    """
    plain = {name: value for name in _PLAIN if (value := getattr(body, name, None)) not in (None, False)}
    names = list(plain)
    asked = getattr(body, "response_format", None)
    if asked is not None and asked.type != "text":
        names.append("response_format")
    if getattr(body, "structured_outputs", None) is not None:
        names.append("structured_outputs")
    if not names:
        return None
    name = names[0]
    _check(len(names) == 1, names[-1], None, f"Only one of {' and '.join(names)} may be set.")
    if name in plain:
        form = _form(body, name, **{_PLAIN[name]: plain[name]})
    else:
        form = _response_format(body) if name == "response_format" else _structured_outputs(body)
    try:
        size = len(msgspec.msgpack.encode(form))
    except OverflowError:
        raise InvalidRequestError(f"{name} has a whole number of more than 64 bits.", param=name) from None
    _check(
        size <= max_bytes,
        name,
        size,
        f"{name} has {size:,} bytes, and this server takes at most {max_bytes:,}; start it with a larger "
        "--max-schema-bytes.",
    )
    return form


def _check(condition: bool, param: str, value: Any, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message, param=param, value=value)


def _response_format(body: Any) -> StructuredOutputsParams:
    given = body.response_format
    assert given is not None
    extra = given.model_extra or {}
    match given.type:
        case "json_object":
            schema = extra.get("schema")
            if schema is None:
                return _form(body, "response_format", json_object=True)
            name = "response_format.schema"
            _check(isinstance(schema, dict), name, schema, f"{name} must be an object, the JSON schema.")
            return _form(body, "response_format", json=schema)
        case "json_schema":
            schema = (given.json_schema or {}).get("schema")
            name = "response_format.json_schema.schema"
            _check(isinstance(schema, dict), name, schema, f"{name} must be provided: an object, the JSON schema.")
            return _form(body, "response_format", json=schema)
        case "structural_tag":
            return _form(body, "response_format", structural_tag=extra)
        case "grammar":
            return _form(body, "response_format", grammar=extra.get("grammar"))
    raise InvalidRequestError(
        "response_format.type must be one of text, json_object, json_schema, structural_tag, grammar.",
        param="response_format.type",
        value=given.type,
    )


def _structured_outputs(body: Any) -> StructuredOutputsParams:
    assert body.structured_outputs is not None
    given = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    parts = tuple(FramePart(**one) for one in given.pop("parts", ()))
    return StructuredOutputsParams(**given, parts=parts)


def _form(body: Any, param: str, **form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**form, param=param, whitespace_pattern=body.guided_whitespace_pattern)
