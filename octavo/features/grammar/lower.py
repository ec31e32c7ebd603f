"""From what a request asks for to the text of one grammar, in the language of llguidance.

That language (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) is Lark's with JSON schemas, regular
expressions and special tokens as terminals.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import JSON_WHITESPACE, StructuredOutputsParams
from octavo.features.grammar.tags import tags_to_lark


def lower(params: StructuredOutputsParams) -> str:
    """The grammar's text.

    Raises:
        InvalidRequestError: it can be seen without compiling that this is no schema, grammar or tag.
    """
    if params.frame is None:
        return _lower(params)
    grammars: list[dict[str, Any]] = [{"lark_grammar": params.frame}]
    if params.form != "frame":
        (inner,) = json.loads(_lower(params))["grammars"]
        grammars.append(inner | {"name": "content"})
    return json.dumps({"grammars": grammars})


def _lower(params: StructuredOutputsParams) -> str:
    match params.form:
        case "json":
            return _json(_object(params.json, "json", params.param), params)
        case "json_object":
            return _json({"type": "object"}, params)
        case "regex":
            return str(LLMatcher.grammar_from_regex(params.regex or ""))
        case "choice":
            return _lark("start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in params.choice or ()))
        case "structural_tag":
            tag = _object(params.structural_tag, "structural_tag", params.param)
            return _lark(tags_to_lark(tag, json_options(params), params.param))
    return _lark(_any_notation(params.grammar or "", params.param))


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """How JSON may be laid out."""
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or JSON_WHITESPACE}


def _json(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    if params.disable_additional_properties:
        schema = _closed(schema)
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=json_options(params)))


def _lark(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def _object(value: str | dict[str, Any] | None, what: str, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise InvalidRequestError(f"{what} of {param} is not valid JSON: {exc}.", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} of {param} must be a JSON object.", param=param, value=value)
    return value


def _closed(schema: Any) -> Any:
    """The schema, in which objects hold only what it names."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in ("enum", "const") else _closed(value) for key, value in schema.items()}
    if isinstance(closed.get("properties"), dict) and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


def _any_notation(source: str, param: str) -> str:
    """Lark as it is; EBNF, which defines with `::=`, made into Lark."""
    try:
        return str(any_to_lark(source))
    except Exception as exc:  # the converter raises whatever its parser meets
        raise InvalidRequestError(f"The grammar can't be read as EBNF: {exc}", param=param) from None
