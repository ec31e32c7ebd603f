"""Arguments written one by one: what the grammar lets through is read as JSON of the schema, however it is cut."""

from __future__ import annotations

import ctypes
import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from toy_tokenizers import byte_level

from octavo.core.errors import InvalidRequestError
from octavo.features.grammar.lower import lower
from octavo.text.answers.plan import OutputPlan
from octavo.text.answers.router import Router
from octavo.text.tokenizers.tokenizer import Tokenizer
from octavo.text.tools.formats import FORMATS, GLM45, KIMI, PYTHONIC, QWEN_CODER, ToolFormat
from octavo.text.tools.tool import Tool, ToolUse

KEYED = [form for form in FORMATS.values() if form.keyed is not None]
BACKEND = byte_level()
TOKENIZER, GRAMMAR_TOKENIZER = Tokenizer(BACKEND), LLTokenizer(BACKEND.to_str(), eos_token=[2])
quick = settings(max_examples=30, deadline=None)

SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 4},
    {"type": ["string", "null"], "maxLength": 3},
    {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": "null"}], "title": "Maybe"},
    {"enum": ["celsius", "no\nline", "nu"]},
    {"const": "null and void"},
    {"type": "string", "pattern": "^[ab]{2}$"},
    {"type": "integer", "minimum": 0, "maximum": 40},
    {"type": "boolean"},
    {"type": "array", "items": {"enum": [1, "a,)", True]}, "maxItems": 2},
    {"$ref": "#/$defs/point"},
]
DEFS = {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}}


@st.composite
def tools(draw: st.DrawFn) -> Tool:
    chosen = draw(st.lists(st.sampled_from(SCHEMAS), max_size=4))
    names = draw(st.permutations(["city", "a-b", "días", "_", "x=y>z", 'x"', "x=y>", "</arg_key>"]))
    properties = dict(zip(names, chosen, strict=False))
    required = [name for name in properties if draw(st.booleans())]
    parameters = {"type": "object", "properties": properties, "required": required, "$defs": DEFS}
    return Tool(name=draw(st.sampled_from(["f", "get_weather"])), parameters=parameters)


def plan_of(form: ToolFormat, *chosen: Tool, mode: Any = "required") -> OutputPlan:
    return OutputPlan(format=form, tools=ToolUse(offered=chosen, callable=chosen, mode=mode, parallel=False))


def matcher(plan: OutputPlan) -> LLMatcher:
    form = plan.form(TOKENIZER)
    assert form is not None
    made = LLMatcher(GRAMMAR_TOKENIZER, lower(form), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def takes(text: str, plan: OutputPlan) -> bool:
    return fits(matcher(plan), text)


def fits(grammar: LLMatcher, text: str) -> bool:
    made = grammar.deep_copy()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


CLOSING = [set(TOKENIZER.encode(marks, add_special_tokens=False)) for marks in ('"x', "}])")]
"""What ends a part; the "x" because `point` does not end without one."""


def said(plan: OutputPlan, seed: int) -> str:
    """Whatever the grammar lets through, chosen at random; from some length on what is open is closed if it can be."""
    made, rng, tokens = matcher(plan), random.Random(seed), []
    words = (GRAMMAR_TOKENIZER.vocab_size + 31) // 32
    mask = bytearray(4 * words)
    for count in range(1000):
        if made.is_stopped():
            return TOKENIZER.decode(tokens)
        made.unsafe_compute_mask_ptr(address(mask), len(mask))
        allowed = [token for token in range(3, GRAMMAR_TOKENIZER.vocab_size) if mask[token // 8] >> token % 8 & 1]
        if not allowed:  # only the end of the sequence
            return TOKENIZER.decode(tokens)
        ways = [sorted(marks.intersection(allowed)) for marks in CLOSING if count > 200]
        tokens.append(rng.choice(next(filter(None, ways), allowed)))
        assert made.try_consume_tokens([tokens[-1]]) == 1
    raise AssertionError("the grammar lets nobody come to an end")


def address(data: bytearray) -> int:

    return ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))


def read(router: Router, pieces: list[str]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for piece in [piece for text in pieces for piece in router.push(text)] + router.flush():
        assert piece.kind == "call"
        if piece.name is not None:
            calls.append((piece.name, piece.text))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return calls


@quick
@given(form=st.sampled_from(KEYED), tool=tools(), seed=st.integers(0, 99), places=st.lists(st.integers(0, 200)))
def test_what_the_grammar_lets_through_is_read_as_the_schema_says(
    form: ToolFormat, tool: Tool, seed: int, places: list[int]
) -> None:
    plan = plan_of(form, tool)
    text = said(plan, seed)
    ((name, arguments),) = read(plan.router(), [text])
    assert name == tool.name
    jsonschema.validate(json.loads(arguments), dict(tool.parameters))
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    assert read(plan.router(), [text[a:b] for a, b in itertools.pairwise(bounds)]) == [(name, arguments)]
    assert read(plan.router(), list(text)) == [(name, arguments)]


WEATHER = Tool(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wet": {"type": "boolean"}},
        "required": ["city"],
    },
)


@pytest.mark.parametrize("form", KEYED, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "arguments", [{"city": 'a "b" \\ c'}, {"city": "Rome", "days": 3}, {"city": "x\ny", "days": 1, "wet": True}]
)
def test_calls_in_each_format(form: ToolFormat, arguments: dict[str, Any]) -> None:
    plan = plan_of(form, WEATHER)
    text = form.group_open + form.write("weather", json.dumps(arguments)) + form.group_close
    assert takes(text, plan)
    assert read(plan.router(), list(text)) == [("weather", json.dumps(arguments))]


@pytest.mark.parametrize("form", KEYED, ids=lambda form: form.name)
@pytest.mark.parametrize("arguments", [{}, {"days": 3}, {"city": "a", "days": "many"}, {"city": "a", "town": "b"}])
def test_what_is_no_call_is_not_let_through(form: ToolFormat, arguments: dict[str, Any]) -> None:
    text = form.group_open + form.write("weather", json.dumps(arguments)) + form.group_close
    assert not takes(text, plan_of(form, WEATHER))


@pytest.mark.parametrize("form", KEYED, ids=lambda form: form.name)
def test_words_may_begin_like_others_and_their_end(form: ToolFormat) -> None:
    assert form.keyed is not None
    words = ["<", "<<", "<=", "<\n", f"<{form.keyed.value_close[:3]}", "", "nu", "null "]
    kinds: list[dict[str, Any]] = [{"enum": words}, {"type": ["string", "null"], "enum": words}]
    for schema in kinds:
        plan = plan_of(form, Tool(name="f", parameters={"properties": {"a": schema}, "required": ["a"]}))
        grammar = matcher(plan)
        for word in words:
            arguments = json.dumps({"a": word})
            text = form.group_open + form.write("f", arguments) + form.group_close
            assert fits(grammar, text), word
            assert read(plan.router(), list(text)) == [("f", arguments)]


@pytest.mark.parametrize("word", ["a\n</parameter>\nb", "a\n</parameter>"])
def test_words_that_would_end_early_are_quoted(word: str) -> None:
    assert QWEN_CODER.keyed is not None
    assert QWEN_CODER.keyed.kind({"enum": ["a", word]}) == "json"
    assert QWEN_CODER.keyed.kind({"enum": ["a", word[:-1]]}) == ("json" if word.endswith("b") else "text")


@pytest.mark.parametrize("form", KEYED, ids=lambda form: form.name)
@pytest.mark.parametrize("bounds", [{}, {"maxLength": 3}, {"minLength": 5}, {"minLength": 0, "maxLength": 9}])
def test_a_string_may_be_null_whatever_its_length(form: ToolFormat, bounds: dict[str, int]) -> None:
    schema = {"anyOf": [{"type": "string"} | bounds, {"type": "null"}]}
    plan = plan_of(form, Tool(name="f", parameters={"properties": {"a": schema}, "required": ["a"]}))
    text = form.group_open + form.write("f", '{"a": null}').replace("None", "null") + form.group_close
    assert takes(text, plan)
    assert read(plan.router(), list(text)) == [("f", '{"a": null}')]
    long = form.group_open + form.write("f", '{"a": "abcd"}') + form.group_close
    assert takes(long, plan) == (bounds.get("maxLength", 4) >= 4 >= bounds.get("minLength", 4))


@pytest.mark.parametrize("form", [form for form in KEYED if form.keyed and form.keyed.raw], ids=lambda form: form.name)
def test_a_string_that_is_too_short_cannot_be_closed(form: ToolFormat) -> None:
    properties = {"a": {"type": "string", "minLength": 30}, "b": {"type": "integer"}}
    plan = plan_of(form, Tool(name="f", parameters={"properties": properties, "required": ["a"]}))
    made = matcher(plan)
    begin, end = form.write("f", '{"a": "ab"}').split("ab")
    tokens = TOKENIZER.encode(f"{form.group_open}{begin}ab{end}", add_special_tokens=False)
    assert made.try_consume_tokens(tokens) < len(tokens)
    assert takes(f"{form.group_open}{begin}{'ab' * 15}{end}{form.group_close}", plan)


@pytest.mark.parametrize("form", [QWEN_CODER, PYTHONIC], ids=lambda form: form.name)
@pytest.mark.parametrize("needed", ["", "a", "c", "bd", "abcde"])
def test_arguments_are_in_order_and_any_but_the_required_may_be_missing(form: ToolFormat, needed: str) -> None:
    properties = {key: {"type": "integer"} for key in "abcde"}
    plan = plan_of(form, Tool(name="f", parameters={"properties": properties, "required": list(needed)}))
    grammar = matcher(plan)
    for count in range(6):
        for names in itertools.permutations("abcde", count):
            text = form.group_open + form.write("f", json.dumps(dict.fromkeys(names, 1))) + form.group_close
            tokens = TOKENIZER.encode(text, add_special_tokens=False)
            made = grammar.deep_copy()
            taken = made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()
            assert taken == (sorted(names) == list(names) and set(needed) <= set(names)), names


@pytest.mark.parametrize("form", KEYED, ids=lambda form: form.name)
def test_grammars_grow_in_proportion_to_the_arguments(form: ToolFormat) -> None:
    def size(count: int) -> int:
        properties = {f"p{number}": {"type": "integer"} for number in range(100, 100 + count)}
        wanted = plan_of(form, Tool(name="f", parameters={"properties": properties})).form(TOKENIZER)
        assert wanted is not None
        return len(str(wanted.frame))

    assert size(800) < 3 * size(400)


def test_how_the_formats_look() -> None:
    arguments = '{"city": "Rome", "days": 3}'
    coder = "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    assert QWEN_CODER.write("f", arguments) == coder + "</function>\n</tool_call>"
    first = "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    assert GLM45.write("f", arguments).startswith(first)
    assert PYTHONIC.write("f", '{"a": "x", "b": null, "c": [true]}') == 'f(a="x", b=None, c=[true])'
    assert KIMI.write("f", "{}", 2) == "<|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{}<|tool_call_end|>"


def test_calls_that_are_numbered_keep_their_ids() -> None:
    plan = plan_of(KIMI, WEATHER, Tool(name="clock"), mode="auto")
    text = KIMI.group_open + KIMI.write("weather", '{"city": "Rome"}', 7) + KIMI.write("clock", "{}", 8)
    pieces = plan.router().push("So: " + text + KIMI.group_close)
    assert [(piece.name, piece.id) for piece in pieces if piece.name] == [
        ("weather", "functions.weather:7"),
        ("clock", "functions.clock:8"),
    ]
    assert takes("So: " + KIMI.group_open + KIMI.write("clock", "{}", 12) + KIMI.group_close, plan)


@pytest.mark.parametrize("form", KEYED, ids=lambda form: form.name)
def test_names_of_arguments_may_contain_marks(form: ToolFormat) -> None:
    assert form.keyed is not None
    names = ["a", f"a{form.keyed.key_close}b", f"{form.keyed.key_close}c", "ab"]
    plan = plan_of(form, Tool(name="f", parameters={"properties": {name: {"type": "integer"} for name in names}}))
    arguments = json.dumps(dict.fromkeys(names, 1))
    text = form.group_open + form.write("f", arguments) + form.group_close
    assert takes(text, plan)
    assert read(plan.router(), [text]) == read(plan.router(), list(text)) == [("f", arguments)]


def test_python_words_become_json() -> None:
    router = plan_of(PYTHONIC, WEATHER).router()
    assert read(router, ['[weather(city="a", wet=', "Tr", "ue, n=None)]"]) == [
        ("weather", '{"city": "a", "wet": true, "n": null}')
    ]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "True False None true null 3"),
        ({"type": ["boolean", "null"]}, "True False None true null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None null 3"),
        ({"type": "boolean", "const": True}, "True"),
        ({"enum": [1, None]}, "None null"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "None null 3"),
        ({"allOf": [{"type": ["integer", "null"]}]}, "None null 3"),
        ({"allOf": [{"type": "null"}, {}]}, "null"),
        (True, "True False None true null 3"),
    ],
)
def test_python_words_stand_for_the_values_that_the_schema_allows(schema: Any, words: str) -> None:
    plan = plan_of(PYTHONIC, Tool(name="f", parameters={"properties": {"a": schema}, "required": ["a"]}))
    grammar = matcher(plan)
    taken = ["True", "False", "None", "true", "null", "3"]
    assert [word for word in taken if fits(grammar, f"[f(a={word})]")] == words.split()


def test_a_strict_schema_is_enforced_whole_or_refused() -> None:
    open_ended = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": True}
    with pytest.raises(InvalidRequestError, match="additionalProperties"):
        plan_of(QWEN_CODER, Tool(name="f", parameters=open_ended, strict=True)).form(TOKENIZER)
    matcher(plan_of(QWEN_CODER, Tool(name="f", parameters=open_ended)))
