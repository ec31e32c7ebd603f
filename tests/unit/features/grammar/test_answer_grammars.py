"""The grammar of an answer takes what a router reads, and nothing that it could misread."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from toy_tokenizers import byte_level

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import StructuredOutputsParams
from octavo.features.grammar.lower import lower
from octavo.text.answers.plan import OutputPlan
from octavo.text.answers.reasoning import MISTRAL_THINK, THINK
from octavo.text.tokenizers.tokenizer import Tokenizer
from octavo.text.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, PYTHONIC, ToolFormat
from octavo.text.tools.tool import Tool, ToolUse

WEATHER = Tool(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Tool(name="clock")
CITY, BAD = '{"city": "Rome"}', '{"town": "Rome"}'


def make(*special: str) -> tuple[Tokenizer, LLTokenizer]:
    backend = byte_level()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(backend), LLTokenizer(backend.to_str(), eos_token=[2])


PLAIN = make()
MARKED = make("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<tool_call>", "</tool_call>")


def use(mode: Any, *, parallel: bool = True, tools: tuple[Tool, ...] = (WEATHER, CLOCK)) -> ToolUse:
    return ToolUse(offered=tools, callable=tools, mode=mode, parallel=parallel)


def takes(text: str, kind: tuple[Tokenizer, LLTokenizer] = PLAIN, **plan: Any) -> bool:
    return matched(compiled(OutputPlan(**{"format": HERMES, **plan}), kind), text, kind)


def compiled(plan: OutputPlan, kind: tuple[Tokenizer, LLTokenizer]) -> LLMatcher:
    form = plan.form(kind[0])
    assert form is not None
    matcher = LLMatcher(kind[1], lower(form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matched(matcher: LLMatcher, text: str, kind: tuple[Tokenizer, LLTokenizer]) -> bool:
    tokens = kind[0].encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or matcher.is_stopped())


def calls(form: ToolFormat, *made: tuple[str, str]) -> str:
    return form.group_open + form.separator.join(form.write(*one) for one in made) + form.group_close


@pytest.mark.parametrize("kind", [PLAIN, MARKED], ids=["text marks", "special tokens"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_calls_in_every_format(form: ToolFormat, kind: tuple[Tokenizer, LLTokenizer]) -> None:
    one, two = calls(form, ("weather", CITY)), calls(form, ("weather", CITY), ("clock", "{}"))
    for mode in ("auto", "required"):
        assert takes(one, kind, format=form, tools=use(mode))
        assert takes(two, kind, format=form, tools=use(mode))
        assert not takes(two, kind, format=form, tools=use(mode, parallel=False))
        assert not takes(calls(form, ("weather", BAD)), kind, format=form, tools=use(mode))
        assert not takes(calls(form, ("whether", CITY)), kind, format=form, tools=use(mode))
        assert takes("Just words.", kind, format=form, tools=use(mode)) == (mode == "auto")
        assert takes("", kind, format=form, tools=use(mode)) == (mode == "auto")
    named = use("named", tools=(WEATHER,))
    assert takes(one, kind, format=form, tools=named)
    assert not takes(two, kind, format=form, tools=named)
    if form.trigger:
        assert takes("Let me see.\n" + one, kind, format=form, tools=use("auto"))
        assert not takes(one + " and more words", kind, format=form, tools=use("auto"))
        assert not takes(f"words {form.trigger} words", kind, format=form, tools=use("auto"))


@pytest.mark.parametrize("kind", [PLAIN, MARKED], ids=["text marks", "special tokens"])
def test_reasoning_comes_first(kind: tuple[Tokenizer, LLTokenizer]) -> None:
    call = calls(HERMES, ("clock", "{}"))
    plan: dict[str, Any] = {"tools": use("required"), "reasoning": THINK}
    assert takes("<think>\nhm, {</think>\n\n" + call, kind, **plan)
    assert takes(call, kind, **plan)
    assert not takes("<think>hm" + call, kind, **plan)
    assert takes("\nhm</think>" + call, kind, **plan, inside=True)
    assert not takes(call, kind, **plan, inside=True)


@pytest.mark.parametrize(
    ("inside", "begin", "mark"),
    [(False, "a ", ""), (False, "", "<think>"), (True, "a</think>b", ""), (True, "a", "</think>")],
)
@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_special_tokens_are_not_spelled_by_others(form: ToolFormat, inside: bool, begin: str, mark: str) -> None:
    plan = OutputPlan(format=form, tools=use("auto"), reasoning=THINK, inside=inside)
    mark = mark or form.trigger
    parts = [MARKED[0].encode(part, add_special_tokens=False) for part in (begin, mark[:4], mark[4:])]
    tokens = list(itertools.chain(*parts))
    assert compiled(plan, MARKED).try_consume_tokens(tokens) == len(tokens) - 1


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [PLAIN, MARKED], ids=["text marks", "special tokens"])
@pytest.mark.parametrize("form", [HERMES, LLAMA3, PYTHONIC], ids=lambda form: form.name)
def test_reasoning_and_calls_are_where_the_router_finds_them(
    form: ToolFormat, kind: tuple[Tokenizer, LLTokenizer], inside: bool
) -> None:
    """Of all answers made of these parts, those that the grammar takes are read without loss."""
    plan = OutputPlan(format=form, tools=use("auto"), reasoning=THINK, inside=inside)
    matcher = compiled(plan, kind)
    parts = ["<think>", "</think>", "\n", "\t", "a", form.opening[0], calls(form, ("clock", "{}"))]
    took = 0
    for chosen in itertools.chain(*(itertools.product(parts, repeat=count) for count in range(5))):
        text = "".join(chosen)
        if matched(matcher.deep_copy(), text, kind):
            took += 1
            router = plan.router()
            pieces = router.push(text) + router.flush()
            said = "".join(piece.text for piece in pieces if piece.kind != "call")
            made = "".join(f"{piece.name or ''}{piece.text}" for piece in pieces if piece.kind == "call")
            count = len(made) // len("clock{}")
            assert made == "clock{}" * count, text
            left = text.removesuffix("\n".join([parts[-1]] * count))
            for mark in ["<think>", "</think>"] if not inside and text.startswith("<think>") else ["</think>"] * inside:
                left = left.replace(mark, "", 1)
            assert "".join(said.split()) == "".join(left.split()), text
    assert took > 100


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json": {"type": "boolean"}}, "true", "yes"),
        ({"regex": "[0-9]+"}, "12", "x"),
        ({"choice": ["a", "b"]}, "b", "c"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x1", "x"),
        ({"json_object": True}, "{}", "[]"),
    ],
)
def test_content_has_its_form_within_the_frame(form: dict[str, Any], good: str, bad: str) -> None:
    content = StructuredOutputsParams(**form)
    assert takes(f"<think>why</think>\n{good}", reasoning=THINK, content=content)
    assert takes(good, reasoning=MISTRAL_THINK, content=content)
    assert not takes(f"<think>why</think>{bad}", reasoning=THINK, content=content)
    plan: dict[str, Any] = {"tools": use("auto"), "content": content}
    assert takes(good, **plan)
    assert takes(calls(HERMES, ("clock", "{}")), **plan)
    assert not takes(bad, **plan)
    with pytest.raises(InvalidRequestError, match="llama3_json"):
        OutputPlan(format=LLAMA3, **plan).form(PLAIN[0])


def test_strict_schemas_are_enforced_whole_or_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
    for strict in (False, True):
        tool = Tool(name="f", parameters=schema, strict=strict)
        form = OutputPlan(format=MISTRAL, tools=use("auto", tools=(tool,))).form(PLAIN[0])
        assert form is not None
        matcher = LLMatcher(PLAIN[1], lower(form), log_level=0)
        assert matcher.is_error() == strict


def test_nothing_declared_is_nothing_masked() -> None:
    assert OutputPlan(format=HERMES, reasoning=THINK).form(PLAIN[0]) is None
    content = StructuredOutputsParams(regex="a")
    assert OutputPlan(format=HERMES, content=content).form(PLAIN[0]) is content
    assert json.loads(lower(content))["grammars"]
