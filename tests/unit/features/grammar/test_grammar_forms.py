"""Every form of output, lowered to a grammar, takes what it should and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from toy_tokenizers import byte_level

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import MAX_CHOICES, StructuredOutputsParams
from octavo.features.grammar.lower import lower

BACKEND = byte_level()
TOKENIZER = LLTokenizer(BACKEND.to_str(), eos_token=[2])

SQL = """
start: "SELECT " columns " FROM " NAME [" WHERE " condition]
columns: "*" | NAME ("," " "? NAME)*
condition: NAME " " ("=" | "<" | ">") " " (NUMBER | STRING)
NAME: /[a-z_]{1,16}/
NUMBER: /[0-9]+/
STRING: /'[^']*'/
"""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
TAGS: dict[str, Any] = {
    "structures": [{"begin": "<call=add>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call="],
}


def takes(text: str, **form: Any) -> bool:
    """Whether the whole text, and an end after it, fit the form."""
    matcher = LLMatcher(TOKENIZER, lower(StructuredOutputsParams(**form)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BACKEND.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or matcher.is_stopped())


def formed(kind: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": kind}}


ANY = {"type": "any_text"}
ADD = {"type": "tag", "begin": "<add>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</add>"}
NOTE = {"type": "tag", "begin": "<note>", "content": ANY, "end": "</note>"}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json": PERSON}, ['{"name":"Al","age":3}', '{\n  "name": "Al"\n}'], ['{"age":3}', '{"name":1}', "{}", "[]"]),
        ({"json": {"type": "string", "minLength": 1.0, "maxLength": 2.0}}, ['"a"', '"ab"'], ['""', '"abc"']),
        ({"json": '{"type": "boolean"}'}, ["true"], ['"true"', "1"]),
        ({"json": {"enum": ["a/b", "ü", 7]}}, ['"a/b"', '"ü"', "7"], ['"a"', "8"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a":}']),
        ({"regex": r"\d{3}-[a-z/]+"}, ["123-ab/c"], ["12-ab", "123-AB", "123-"]),
        ({"regex": "a\nb"}, ["a\nb"], ["ab"]),
        ({"choice": ["yes", 'no "really"', "a\nb", "naïve"]}, ["yes", 'no "really"', "a\nb", "naïve"], ["ye", "no"]),
        ({"choice": ["a", "ab", "abc"]}, ["a", "ab", "abc"], ["abcd", "b"]),
        ({"choice": [str(number) for number in range(MAX_CHOICES)]}, ["0", "77", "4095"], ["4096", "x"]),
        ({"grammar": SQL}, ["SELECT * FROM users", "SELECT a, b FROM t WHERE a < 3"], ["SELECT FROM t", "DROP t"]),
        ({"grammar": 'root ::= "x" n\nn ::= [0-9]+ | "-"'}, ["x12", "x-"], ["x", "12"]),
        (
            {"grammar": "root ::= 'say ' n # it's\nn ::= 'a' | \"it's\" | [']+"},
            ["say a", "say it's", "say ''"],
            ["say b"],
        ),
        (
            {"grammar": r"""root ::= 'it\'s' | '"\\' | "" 'a\n' | 'x"y'"""},
            ["it's", '"\\', "a\n", 'x"y'],
            ["it", '"', "a", "x"],
        ),
        ({"grammar": '?start: "a" | other\nother: "::="'}, ["a", "::="], ["b"]),
        (
            {"structural_tag": TAGS},
            ["just words", 'well: <call=add>{"name":"x"}</call> and <b>more</b>', '<call=add>{"name":"x"}</call>'],
            ['<call=add>{"age":1}</call>', "<call=sub>{}</call>"],
        ),
        (formed({"type": "const_string", "value": 'a"b'}), ['a"b'], ["a"]),
        (
            formed({"type": "sequence", "elements": [{"type": "regex", "pattern": "[0-9]/x"}, ADD]}),
            ['1/x<add>{"name":"x"}</add>'],
            ["1/x"],
        ),
        (formed({"type": "or", "elements": [ADD, NOTE]}), ["<note>any <b> thing</note>"], ["<note>", "x"]),
        (
            formed({"type": "triggered_tags", "triggers": ["<add", "<no"], "tags": [ADD, NOTE], "at_least_one": True}),
            ["so: <note>n</note> and", '<add>{"name":"x"}</add><note>1</note>'],
            ["only words", "<note>never ends"],
        ),
        (
            formed({"type": "triggered_tags", "triggers": ["<no"], "tags": [NOTE], "stop_after_first": True}),
            ["words", "so <note>n</note>"],
            ["<note>n</note> and more"],
        ),
        (
            formed({"type": "tags_with_separator", "tags": [ADD, NOTE], "separator": ", ", "at_least_one": True}),
            ["<note>n</note>", '<note>n</note>, <add>{"name":"x"}</add>'],
            ["", "<note>n</note>;<note>n</note>"],
        ),
    ],
)
def test_a_form_takes_what_it_should(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(text, **form)] == []
    assert [text for text in bad if takes(text, **form)] == []


def test_white_space_in_json_is_bounded_and_can_be_forbidden() -> None:
    assert takes('{ "name": "x" }', json=PERSON)
    assert not takes('{  \n\n  "name":"x"}', json=PERSON)
    assert not takes('{ "name":"x"}', json=PERSON, disable_any_whitespace=True)
    assert takes('{\t"name":"x"}', json=PERSON, whitespace_pattern=r"\t?")
    assert not takes('{ "name":"x"}', json=PERSON, whitespace_pattern=r"\t?")


NESTED = {"type": "object", "properties": {"a": PERSON}}
MORE = '{"a":{"name":"x","more":1}}'
NAMES = {"type": "object", "properties": {"properties": PERSON, "allOf": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        NESTED,
        {"$defs": {"p": PERSON}, "type": "object", "properties": {"a": {"$ref": "#/$defs/p"}}},
        {"anyOf": [NESTED, {"type": "object", "properties": {"b": PERSON}}]},
        NESTED | {"additionalProperties": True},
    ],
)
def test_objects_hold_only_what_their_schema_names(schema: dict[str, Any]) -> None:
    assert takes('{"a":{"name":"x"}}', json=schema)
    assert not takes(MORE, json=schema)
    assert not takes('{"properties":{"name":"x","more":1}}', json=NAMES)
    assert takes('{"properties":{"name":"x"},"allOf":"y"}', json=NAMES)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": PERSON | {"additionalProperties": True}}}, MORE),
        ({"allOf": [NESTED, {"type": "object", "properties": {"b": {"type": "integer"}}}]}, '{"a":{"name":"x"},"b":1}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}, '{"a":1,"b":2}'),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "minProperties": 2},
            '{"a":1,"b":2}',
        ),
        ({"type": "object", "properties": {}}, '{"b":2}'),
        ({"type": "object", "enum": [{"properties": {"a": 1}}]}, '{"properties":{"a":1}}'),
    ],
)
def test_an_object_stays_open_where_more_is_asked_for_than_named(schema: dict[str, Any], text: str) -> None:
    assert takes(text, json=schema)


def test_all_objects_can_be_closed() -> None:
    joined = {"allOf": [NESTED]}
    assert takes(MORE, json=joined)
    assert not takes(MORE, json=joined, disable_additional_properties=True)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": '{"items":' * 100_000}, "not valid JSON"),
        ({"json": "[]"}, "must be a JSON object"),
        ({"grammar": 'root ::= "'}, "can't be read as EBNF"),
        ({"grammar": "root ::= 'a"}, "can't be read as EBNF"),
        ({"structural_tag": {}}, "must have 'format'"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structures must be a list"),
        ({"structural_tag": TAGS | {"triggers": []}}, "triggers must be a list"),
        ({"structural_tag": TAGS | {"triggers": ["<x"]}}, "beginning of a tag"),
        ({"structural_tag": TAGS | {"triggers": ["<call=", "y"]}}, "beginning of a tag"),
        (formed({"type": "nope"}), "format.type must be one of"),
        (formed({"type": "const_string"}), "must be a string"),
        (formed(NOTE | {"end": ""}), "must not be empty after any_text"),
    ],
)
def test_what_is_no_form_is_refused_with_the_reason(form: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        lower(StructuredOutputsParams(**form, param="there"))
    assert caught.value.param == "there"
