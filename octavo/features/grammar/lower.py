"""Convert a request's constraint to a grammar in llguidance's language.

That language (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) is Lark's with JSON schemas, regular
expressions and special tokens as terminals.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from octavo.core.errors import InvalidRequestError
from octavo.core.json_schema import with_plain_counts
from octavo.core.structured import JSON_WHITESPACE, FramePart, StructuredOutputsParams
from octavo.features.grammar.closing import closed
from octavo.features.grammar.tags import tags_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only its stub has it

_DEFINITION = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)('?)|"(?:[^"\\]|\\.)*"?|\[(?:[^]\\]|\\.)*]?|#[^\r\n]*""", re.DOTALL)
"""An EBNF string in single quotes, or another token within which a single quote is an ordinary character.

An unterminated one extends to the end of the text, so that matching stays linear."""
_INNER = re.compile(r"""\\.|\"""", re.DOTALL)


def lower(params: StructuredOutputsParams) -> str:
    """Return the grammar's text.

    Raises:
        InvalidRequestError: not a schema, grammar or tag, as far as visible without compiling.
    """
    if params.frame is None:
        return _lower(params)
    grammars: list[dict[str, Any]] = [{"lark_grammar": params.frame}]
    for part in params.parts:
        schema = _object(part.schema, part.name, params.param)
        grammars.append({"name": part.name, "json_schema": with_options(schema, part)})
    if params.form != "frame":
        (inner,) = json.loads(_lower(params))["grammars"]
        grammars.append(inner | {"name": "content"})
    return json.dumps({"grammars": grammars})


def with_options(schema: dict[str, Any], part: FramePart) -> dict[str, Any]:
    """Return the schema of a part of a frame, closed where that is possible, with llguidance's options."""
    options: dict[str, Any] = {"whitespace_pattern": JSON_WHITESPACE}
    made = closed(with_plain_counts(schema), everywhere=False)
    return made | {"x-guidance": options if part.strict else options | {"lenient": True}}


def _lower(params: StructuredOutputsParams) -> str:
    match params.form:
        case "json":
            return _json(_object(params.json, "json", params.param), params)
        case "json_object":
            return _json({"type": "object"}, params)
        case "regex":
            return str(LLMatcher.grammar_from_regex(params.regex or ""))
        case "choice":
            words = " | ".join(json.dumps(one, ensure_ascii=False) for one in params.choice or ())
            return _lark(f"start: CHOICE\nCHOICE: {words}")  # a rule may have few alternatives
        case "structural_tag":
            tag = _object(params.structural_tag, "structural_tag", params.param)
            return _lark(tags_to_lark(tag, json_options(params), params.param))
    return _lark(_any_notation(params.grammar or "", params.param))


def json_options(params: StructuredOutputsParams) -> JsonCompileOptions:
    """Return llguidance's options for the whitespace of JSON."""
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or JSON_WHITESPACE}


def _json(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    schema = closed(with_plain_counts(schema), everywhere=params.disable_additional_properties)
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=json_options(params)))


def _lark(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def _object(value: str | dict[str, Any] | None, what: str, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequestError(f"{what} of {param} is not valid JSON: {exc}.", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} of {param} must be a JSON object.", param=param, value=value)
    return value


def _any_notation(source: str, param: str) -> str:
    """Return Lark unchanged; convert EBNF, which defines with `::=`, to Lark."""
    if not _DEFINITION.search(source):
        return source
    try:
        return str(gbnf_to_lark(_QUOTED.sub(_double_quoted, source)))
    except Exception as exc:  # the converter documents no exceptions
        raise InvalidRequestError(f"The grammar can't be read as EBNF: {exc}", param=param) from None


def _double_quoted(part: re.Match[str]) -> str:
    """Return a single-quoted string in double quotes, which the converter requires; other tokens unchanged."""
    if not part[2]:
        return part[0]
    return '"' + _INNER.sub(lambda one: {"\\'": "'", '"': '\\"'}.get(one[0], one[0]), part[1]) + '"'
