"""Schemas of tools that can't be enforced in full: guided as far as possible, or refused where they are at fault."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from toy_tokenizers import byte_level

from octavo.core.errors import InvalidRequestError
from octavo.features.grammar.compiler import Compiler
from octavo.features.grammar.mending import mended
from octavo.text.answers.plan import OutputPlan
from octavo.text.tokenizers.tokenizer import Tokenizer
from octavo.text.tools.formats import GLM45, HERMES, PYTHONIC, QWEN_CODER, ToolFormat
from octavo.text.tools.tool import Tool, ToolUse

BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND)
COMPILER = Compiler(lambda: TOKENIZER, BACKEND.get_vocab_size(), (2,))
KINDS = [HERMES, QWEN_CODER, PYTHONIC, GLM45]
in_each_format = pytest.mark.parametrize("form", KINDS, ids=lambda form: form.name)
AHEAD = "^(?=x)x+$"


def objects(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)} | more


def plan_of(form: ToolFormat, parameters: dict[str, Any], *, strict: bool = False) -> OutputPlan:
    tool = Tool(name="f", parameters=parameters, strict=strict)
    return OutputPlan(format=form, tools=ToolUse(offered=[tool], callable=[tool], mode="required", parallel=False))


def written(form: ToolFormat, arguments: dict[str, Any]) -> str:
    return form.group_open + form.write("f", json.dumps(arguments)) + form.group_close


def takes(form: ToolFormat, parameters: dict[str, Any], arguments: dict[str, Any], *, strict: bool = False) -> bool:
    """Whether a call with these arguments is among the possible answers.

    Raises:
        InvalidRequestError: the schema is refused.
    """
    wanted = plan_of(form, parameters, strict=strict).form(TOKENIZER)
    matcher = COMPILER.open(msgspec.Raw(msgspec.msgpack.encode(wanted))).result().matcher.deep_copy()
    tokens = TOKENIZER.encode(written(form, arguments), add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@in_each_format
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer", "pattern": AHEAD}, 3),
        ({"type": "integer", "format": 3}, 3),
        ({"type": "array", "items": {"type": "string", "pattern": AHEAD}}, ["a"]),
        ({"type": "object", "properties": {"b": {"type": "string", "pattern": "("}}}, {"b": "("}),
        ({"type": "object", "patternProperties": {AHEAD: {}}}, {}),
        ({"type": "thing"}, 1),
        ({"$ref": "elsewhere.json"}, 1),
    ],
)
def test_what_cannot_be_enforced_is_left_out(form: ToolFormat, schema: dict[str, Any], value: Any) -> None:
    parameters = objects({"a": schema, "n": {"type": "integer"}}, "a", "n")
    assert takes(form, parameters, {"a": value, "n": 1})
    assert not takes(form, parameters, {"a": value, "n": "many"})


@in_each_format
def test_what_cannot_be_enforced_is_named(form: ToolFormat) -> None:
    with pytest.raises(InvalidRequestError, match=r"function 'f'.* enum in properties\.a is \[\]"):
        takes(form, objects({"a": {"enum": []}}, "a"), {}, strict=True)
    parameters = objects({"o": objects({"a": {"type": "string", "pattern": AHEAD}})}, additionalProperties=False)
    with pytest.raises(
        InvalidRequestError, match=r"function 'f'.* pattern in properties\.o\.properties\.a .*look-ahead"
    ):
        takes(form, parameters, {}, strict=True)


@in_each_format
@pytest.mark.parametrize("strict", [False, True])
def test_a_required_property_that_is_not_declared_may_be_any_value(form: ToolFormat, strict: bool) -> None:
    inner = objects({"a": {"type": "integer"}}, "b")
    parameters = objects({"o": inner}, "o", "x")
    assert takes(form, parameters, {"o": {"a": 1, "b": [2]}, "x": {"y": 1}}, strict=strict)
    assert not takes(form, parameters, {"o": {"a": 1}, "x": 1}, strict=strict)
    assert not takes(form, parameters, {"o": {"a": 1, "b": 2}}, strict=strict)
    assert not takes(form, parameters, {"o": {"b": 2, "c": 3}, "x": 1}, strict=strict)


@in_each_format
@pytest.mark.parametrize("nested", [False, True])
def test_a_required_property_that_is_forbidden_is_refused_by_strict(form: ToolFormat, nested: bool) -> None:
    inner = objects({"a": {"type": "integer"}}, "b", additionalProperties=False)
    parameters = objects({"o": inner}, "o", additionalProperties=False) if nested else inner
    arguments = {"a": 1, "b": 2}
    assert takes(form, parameters, {"o": arguments} if nested else arguments)
    with pytest.raises(InvalidRequestError, match=r"function 'f'.* required"):
        takes(form, parameters, arguments, strict=True)


@in_each_format
@pytest.mark.parametrize("properties", [[], None])
def test_properties_of_another_type_are_none(form: ToolFormat, properties: Any) -> None:
    assert takes(form, {"type": "object", "properties": properties, "required": "a"}, {})
    assert not takes(form, {"type": "object", "properties": properties}, {"a": 1})
    with pytest.raises(InvalidRequestError, match=r"function 'f'.* properties"):
        takes(form, {"type": "object", "properties": properties}, {}, strict=True)


@in_each_format
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("root", ["#", "http://a.b/c#"])
def test_a_schema_may_refer_to_its_own_parts(form: ToolFormat, strict: bool, root: str) -> None:
    pair = {"type": "array", "items": {"$ref": f"{root}/properties/unit~1name"}, "maxItems": 2}
    node = objects(
        {"next": {"$ref": "#node"}, "unit": {"$ref": f"{root}/properties/units"}}, "unit", **{"$anchor": "node"}
    )
    properties = {"unit/name": {"enum": ["a", "b"]}, "units": pair, "node": {"$ref": f"{root}/$defs/list%20node"}}
    parameters = objects(properties, **{"$id": "http://a.b/c", "$defs": {"list node": node}})
    assert takes(form, parameters, {"units": ["a", "b"], "node": {"next": {"unit": []}, "unit": ["b"]}}, strict=strict)
    assert not takes(form, parameters, {"units": ["c"]}, strict=strict)
    assert not takes(form, parameters, {"node": {"next": {"unit": ["c"]}, "unit": []}}, strict=strict)


@in_each_format
def test_a_schema_may_contain_itself(form: ToolFormat) -> None:
    parameters = objects({"n": {"type": "integer"}, "inner": {"$ref": "#"}}, "n")
    assert takes(form, parameters, {"n": 1, "inner": {"n": 2, "inner": {"n": 3}}})
    assert not takes(form, parameters, {"n": 1, "inner": {"n": 2, "inner": {}}})


@in_each_format
@pytest.mark.parametrize("most", [3.0, 2**63])
def test_any_integer_of_json_is_a_bound(form: ToolFormat, most: float) -> None:
    parameters = objects({"a": {"type": "string", "minLength": 2.0, "maxLength": most}, "b": {"maxItems": most}}, "a")
    assert takes(form, parameters, {"a": "abc", "b": []}, strict=True)
    assert not takes(form, parameters, {"a": "a"}, strict=True)
    assert takes(form, parameters, {"a": "abcd"}, strict=True) == (most > 3)


@in_each_format
def test_objects_in_definitions_and_alternatives_are_closed(form: ToolFormat) -> None:
    point = objects({"x": {"type": "integer"}})
    ways = [{"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, {"anyOf": [point, {"type": "null"}]}]
    for schema in ({"$ref": "#/$defs/point"}, *ways):
        parameters = objects({"a": schema}, **{"$defs": {"point": point}})
        assert takes(form, parameters, {"a": {"x": 1}})
        assert not takes(form, parameters, {"a": {"y": 1}})


def test_definitions_are_mended_in_their_place() -> None:
    node = objects({"next": {"$ref": "#/$defs/node"}, "name": {"type": "string", "pattern": AHEAD}}, "name")
    parameters = objects({"first": {"$ref": "#/$defs/node"}}, "first", **{"$defs": {"node": node}})
    assert takes(HERMES, parameters, {"first": {"next": {"name": "b"}, "name": "a"}})
    assert not takes(HERMES, parameters, {"first": {"next": {}, "name": "a"}})


def test_one_fault_among_many_properties_is_found() -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(450)}
    parameters = objects(properties | {"last": {"type": "string", "pattern": AHEAD}}, "p449")
    assert takes(HERMES, parameters, {"p449": "a", "last": "b"})
    assert not takes(HERMES, parameters, {"p449": 1})


def test_a_schema_with_too_many_faults_is_any_object() -> None:
    parameters = objects({f"p{number}": {"type": "string", "pattern": AHEAD} for number in range(400)}, "p0")
    assert takes(HERMES, parameters, {})


def test_tools_too_large_for_a_grammar_are_refused_in_plain_words() -> None:
    def one(number: int) -> Tool:
        kinds = [{"type": "array", "items": {"enum": [f"{number}-{place}"]}} for place in range(20)]
        return Tool(name=f"f{number}", parameters=objects({f"p{place}": kind for place, kind in enumerate(kinds)}))

    tools = [one(number) for number in range(512)]
    plan = OutputPlan(format=PYTHONIC, tools=ToolUse(offered=tools, callable=tools, mode="auto"))
    option = msgspec.Raw(msgspec.msgpack.encode(plan.form(TOKENIZER)))
    with pytest.raises(InvalidRequestError, match=r"of tools can't be used: it is too large .* fewer tools") as caught:
        COMPILER.open(option).result()
    assert "panic" not in str(caught.value)
    few = OutputPlan(format=PYTHONIC, tools=ToolUse(offered=tools, callable=tools[:64], mode="auto"))
    COMPILER.open(msgspec.Raw(msgspec.msgpack.encode(few.form(TOKENIZER)))).result()


def test_only_the_keyword_at_fault_is_left_out() -> None:
    def error_of(schema: dict[str, Any]) -> str:
        return "bad" if '"bad"' in json.dumps(schema) else ""

    schema = {"type": "array", "items": {"anyOf": [{"enum": [1]}, {"format": "bad", "maxLength": 3}]}, "minItems": 1}
    made, (fault,) = mended(schema, error_of)
    assert made == {"type": "array", "items": {"anyOf": [{"enum": [1]}, {"maxLength": 3}]}, "minItems": 1}
    assert (fault.path, fault.keyword, fault.value) == ("items.anyOf.1", "format", "bad")
    assert mended(made, error_of) == (made, [])


DEFS = {
    "unit": {"type": "string", "enum": ["x", "y"], "description": "Any."},
    "args": objects({"a": {"type": "integer"}, "u": {"$ref": "#/$defs/unit"}}, "a"),
}


def way(kind: str, name: str, schema: Any) -> dict[str, Any]:
    return objects({"kind": {"const": kind}, name: schema}, "kind", name)


@in_each_format
@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"$ref": "#/$defs/args"}, {"a": 1, "u": "x"}, {"u": "x"}),
        ({"allOf": [{"$ref": "#/$defs/args"}, objects({"b": {"type": "integer"}}, "b")]}, {"a": 1, "b": 2}, {"a": 1}),
        (
            {"anyOf": [way("p", "z", {"type": "integer"}), way("q", "w", {"type": "boolean"})]},
            {"kind": "q", "w": True},
            {"kind": "r", "w": True},
        ),
        ({"properties": {"a": {"allOf": [{"$ref": "#/$defs/unit"}], "default": "x"}}}, {"a": "x"}, {"a": "z"}),
        (
            {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}], "default": None}}},
            {"a": "x"},
            {"a": "z"},
        ),
        ({"properties": {"a": {"$ref": "#/properties/a"}, "b": {"type": "integer"}}}, {"b": 1}, {"b": "x"}),
        ({"properties": {"a": False, "b": {"type": "integer"}}}, {"b": 1}, {"a": 1}),
    ],
)
def test_arguments_are_found_wherever_they_are_declared(
    form: ToolFormat, parameters: dict[str, Any], good: dict[str, Any], bad: dict[str, Any]
) -> None:
    parameters = {"$defs": DEFS} | parameters
    assert takes(form, parameters, good)
    assert not takes(form, parameters, bad)


@pytest.mark.parametrize("form", [QWEN_CODER, PYTHONIC, GLM45], ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (
            objects({"a": {"type": "integer"}}, "a", additionalProperties=True),
            [{"a": 1}, {"a": 1, "ab": 5}, {"a": 1, "c": 2, "d": [3]}],
            [{"b": 2}, {"a": "x"}, {"a": 1, "a ": 2}],
        ),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"b": 1}, {"b": 1, "c": 2}], [{"b": "x"}]),
        (objects({}, "b", additionalProperties={"type": "integer"}), [{"b": 1}, {"b": 1, "c": 2}], [{"b": None}, {}]),
        (
            objects({"é": {}}, additionalProperties={"type": "string"}),
            [{"é": 1, "b": "x"}],
            [{"b": "x", "é": 1}, {"è": "x"}],
        ),
    ],
)
def test_arguments_without_a_declaration_are_taken_if_the_schema_allows_them(
    form: ToolFormat, parameters: dict[str, Any], good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    for arguments in good:
        assert takes(form, parameters, arguments), arguments
        pieces = plan_of(form, parameters).router().push(written(form, arguments))
        assert json.loads("".join(piece.text for piece in pieces)) == arguments
    for arguments in bad:
        assert not takes(form, parameters, arguments), arguments
