"""Answers sorted into reasoning, content and calls: the same however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import ConfigError
from octavo.core.structured import StructuredOutputsParams
from octavo.text.answers.formats import AnswerFormats
from octavo.text.answers.plan import OutputPlan
from octavo.text.answers.reasoning import GRANITE, THINK, detect_reasoning, reasoning_format
from octavo.text.answers.router import Router
from octavo.text.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, ToolFormat, detect_format, tool_format
from octavo.text.tools.tool import Tool, ToolUse

# Arguments that are written one by one have tests of their own.
WITH_JSON = [form for form in FORMATS.values() if form.keyed is None]
Read = tuple[str, str, list[tuple[str, str]]]

ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3), max_leaves=4
    ),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), ARGUMENTS), max_size=3)
WORDS = st.text('ab <>{}["\n/_toluc', max_size=20)


def read(router: Router, pieces: list[str]) -> Read:
    reasoning, content, calls = "", "", []
    found = [piece for text in pieces for piece in router.push(text)] + router.flush()
    for piece in found:
        if piece.kind == "reasoning":
            reasoning += piece.text
        elif piece.kind == "content":
            content += piece.text
        elif piece.name is not None:
            assert piece.call == len(calls)
            calls.append((piece.name, piece.text))
        else:
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return reasoning, content, calls


def written(form: ToolFormat, calls: list[tuple[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    plain = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = form.separator.join(form.write(*call) for call in plain)
    return (form.group_open + text + form.group_close if calls else ""), plain


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@given(data=st.data(), form=st.sampled_from(WITH_JSON), calls=CALLS, words=WORDS, thought=WORDS)
def test_an_answer_is_read_as_it_was_written(
    data: st.DataObject, form: ToolFormat, calls: list[tuple[str, Any]], words: str, thought: str
) -> None:
    thinks, inside = data.draw(st.booleans()), data.draw(st.booleans())
    if THINK.end in thought or THINK.begin in words or (form.trigger and form.trigger in words):
        return
    tail, plain = written(form, calls)
    if not form.trigger:  # an answer is either content or calls
        words = "" if calls else words.lstrip("{")
    before = (("" if inside else THINK.begin) + "\n" + thought + "\n" + THINK.end + "\n\n") if thinks else ""
    text = before + words + tail
    router = Router(tools=form, reasoning=THINK, inside=thinks and inside)
    reasoning, content, found = read(router, cut(text, data.draw(st.lists(st.integers(0, 200), max_size=12))))
    assert found == plain
    assert reasoning == (thought.strip() if thinks else "")
    if calls:
        assert content.strip() == words.strip()
    elif thinks:
        assert content == words.lstrip()
    else:
        assert content == words


@given(text=WORDS | st.text(max_size=30), places=st.lists(st.integers(0, 60), max_size=8))
def test_whatever_comes_the_cuts_do_not_matter(text: str, places: list[int]) -> None:
    for options in (
        {},
        {"tools": HERMES},
        {"tools": JSON},
        {"tools": MISTRAL, "reasoning": THINK},
        {"reasoning": THINK},
    ):
        assert read(Router(**options), cut(text, places)) == read(Router(**options), [text])


def test_forced_calls_need_no_trigger() -> None:
    text, plain = written(LLAMA3, [("f", {"a": "}"}), ("g", {})])
    assert read(Router(tools=LLAMA3, forced=True), list(text)) == ("", "", plain)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_call_cut_off_shows_what_there_is(form: ToolFormat) -> None:
    text, ((name, arguments),) = written(form, [("f", {"city": "Paris"})])
    shown = set()
    for length in range(len(text)):
        _, content, calls = read(Router(tools=form), [text[:length]])
        if calls:
            assert calls[0][0] == name
            assert arguments.startswith(calls[0][1])
            shown.add(calls[0][1])
        assert "city" not in content
    assert len(shown) > 2, "nothing was shown before the call was whole"


def test_reasoning_is_counted_while_it_lasts() -> None:
    router = Router(reasoning=THINK, inside=True)
    assert router.in_reasoning
    router.push("I think")
    assert router.in_reasoning
    router.push("</think>so")
    assert not router.in_reasoning
    assert not Router(reasoning=None, inside=True).in_reasoning


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' ~ '[ARGS]' }}", "mistral_args"),
        ("<|python_tag|>", "llama3_json"),
        ("<｜tool▁calls▁begin｜>\n```json", "deepseek_v3"),  # noqa: RUF001
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),  # noqa: RUF001
        ("<tool_call>\n<function=f>", "qwen3_coder"),
        ("<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>f<arg_key>k</arg_key><arg_value>", "glm47"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|python_start|>", "pythonic"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_formats_are_known_by_their_marks(template: str, name: str) -> None:
    assert detect_format(template).name == name


def test_marks_of_ones_own() -> None:
    marks = {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}
    own = AnswerFormats.of(None, reasoning="think", marks=marks).reasoning
    assert own is not None
    assert (own.begin, own.end) == ("<a>", "</a>")
    assert AnswerFormats.of(None, reasoning="none", marks=marks).reasoning is None
    for nothing in ({}, {"reasoning_start_str": "", "reasoning_end_str": ""}):
        assert AnswerFormats.of(None, reasoning="think", marks=nothing).reasoning is THINK
    for wrong in ({"reasoning_start_str": "<a>"}, {**marks, "reasoning_end_str": 1}, {"start": "<a>"}):
        with pytest.raises(ConfigError, match="--reasoning-config"):
            AnswerFormats.of(None, marks=wrong)


def test_names_of_formats() -> None:
    assert tool_format("qwen3") is HERMES
    assert reasoning_format("none") is None
    assert reasoning_format("deepseek_r1") is THINK
    assert detect_reasoning("x</think>") is THINK
    assert detect_reasoning("... and write your response after 'Here is my response:'.") is GRANITE
    assert detect_reasoning("x") is None
    with pytest.raises(ConfigError, match="hermes"):
        tool_format("nope")
    with pytest.raises(ConfigError, match="think"):
        reasoning_format("nope")


def test_reasoning_marked_by_sentences() -> None:
    said = "Here is my thought process: 2 and 2.\nHere is my response:\n4"
    for size in (1, 7, len(said)):
        router = Router(reasoning=GRANITE)
        pieces = [piece for at in range(0, len(said), size) for piece in router.push(said[at : at + size])]
        pieces += router.flush()
        texts = {kind: "".join(one.text for one in pieces if one.kind == kind) for kind in ("reasoning", "content")}
        assert texts == {"reasoning": "2 and 2.", "content": "4"}


@given(calls=CALLS, picks=st.lists(st.integers(0, 2), max_size=6), data=st.data())
@pytest.mark.parametrize("form", WITH_JSON, ids=lambda form: form.name)
def test_an_identical_call_ends_the_list(
    form: ToolFormat, calls: list[tuple[str, Any]], picks: list[int], data: st.DataObject
) -> None:
    made = [(name, json.dumps(given)) for name, given in (calls[pick] for pick in picks if pick < len(calls))]
    first_repeat = next((place for place, call in enumerate(made) if call in made[:place]), None)
    text = form.group_open + form.separator.join(form.write(*call, n) for n, call in enumerate(made))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    router = Router(tools=form, forced=True, once=True)
    found = read(router, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])])
    assert found[2] == made[:first_repeat]
    assert router.repeated == (first_repeat is not None)


def test_a_call_is_held_back_only_while_it_may_be_a_repetition() -> None:
    router = Router(tools=HERMES, forced=True, once=True)
    first, second = HERMES.write("f", '{"a": 1}'), HERMES.write("f", '{"a": 2}')
    router.push(first + "\n")
    assert router.push(second[: second.index("2")]) == []
    assert [piece.text for piece in router.push("2")] == ["", '{"a": ', "2"]
    assert router.push("}")[0].text == "}"
    router.push(second.partition("}")[2] + "\n" + first[: first.index("1")])
    assert [piece.name for piece in router.flush()] == ["f", None]


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.trigger], ids=lambda form: form.name)
def test_content_in_a_required_form_may_contain_the_marks_of_calls(form: ToolFormat) -> None:
    text = json.dumps({"a": f"x {form.trigger} y"}, ensure_ascii=False)
    for pieces in ([text], list(text)):
        assert read(Router(tools=form, apart=True), pieces) == ("", text, [])


def test_calls_beside_a_required_form_begin_the_answer() -> None:
    text, calls = written(HERMES, [("f", {"a": 1})])
    for pieces in ([text], list(text)):
        assert read(Router(tools=HERMES, apart=True), pieces) == ("", "", calls)


def test_an_answer_with_a_required_form_is_routed_as_content_or_calls() -> None:
    text = json.dumps({"a": HERMES.trigger})
    form = StructuredOutputsParams(json={"type": "object"})
    offered = [Tool(name="f")]
    tools = ToolUse(offered=offered, callable=offered, mode="auto")
    router = OutputPlan(format=HERMES, tools=tools, content=form).router()
    assert read(router, [text]) == ("", text, [])
