from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy_tokenizers

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedError
from octavo.text.chat.messages import plain_messages
from octavo.text.chat.template import ChatTemplate, chat_template_of
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(
    toy_tokenizers.byte_level(),
    named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    chat_templates={"default": "model's own"},
)
SIMPLE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "  {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, TOKENIZER).render([USER] if messages is None else messages, **options)


def test_blocks_are_trimmed_and_tokens_known() -> None:
    assert render(SIMPLE) == "<s><user>hi</user><assistant>"
    assert render(SIMPLE, add_generation_prompt=False) == "<s><user>hi</user>"


def test_continuing_the_final_message() -> None:
    messages = [USER, {"role": "assistant", "content": "the hi is "}]
    assert render(SIMPLE, messages, continue_final_message=True) == "<s><user>hi</user><assistant>the hi is "
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    repeated = [{"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    assert render(trimming, repeated, continue_final_message=True) == "[hi][hi"
    with pytest.raises(InvalidRequestError, match="leaves the final message out") as caught:
        render("{{ messages[0].content }}", messages, continue_final_message=True)
    assert caught.value.param == "messages"


def test_a_message_with_calls_is_not_continued() -> None:
    written = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "so", "tool_calls": [CALL]}]
    with pytest.raises(InvalidRequestError, match="send the results of the calls") as caught:
        render(written, messages, continue_final_message=True)
    assert caught.value.param == "messages"
    assert "so" in render(written, messages)


LOOPS = [
    "{% for m in messages %}<{{ m.role }}>{% for c in m['content'] %}{{ c['text'] }}|{% endfor %}{% endfor %}",
    "{% set rest = messages[0:] %}{% for m in rest %}<{{ m.role }}>{% set c = m.content %}"
    "{% for p in c | list %}{{ p.text }}|{% endfor %}{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{% if m.name is string %}{{ m.name }}{% endif %}"
    "{% for c in m.content %}{{ c.text }}|{% endfor %}{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' and m.content is string %}{{ m.content }}"
    "{% elif m.content %}{% for c in m.content %}{{ c.text }}|{% endfor %}{% endif %}{% endfor %}",
    "{% set first = messages[0] %}<{{ first['role'] }}>{% for c in first['content'] %}{{ c.text }}|{% endfor %}",
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_that_goes_through_parts_gets_parts(source: str) -> None:
    assert render(source) == "<user>hi|"
    assert render(source, PARTS) == "<user>a|b|"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == "<assistant>"
    assert render(source, PARTS, continue_final_message=True) == "<user>a|b"
    empty = [{"role": "assistant", "content": []}]
    assert render(source, empty, continue_final_message=True) == "<assistant>"


ASKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for r in m.content %}({{ r.output if r.output is defined else r }}){% endfor %}{% endif %}"
    "{% else %}{% set c = m.content %}{% if c is not string and c is iterable %}"
    "{% for p in c %}{{ p.text }}|{% endfor %}{% else %}{{ c }}{% endif %}{% endif %}{% endfor %}"
)


def test_a_template_that_takes_both_gets_what_was_sent() -> None:
    assert render(ASKING) == "<user>hi"
    assert render(ASKING, PARTS) == "<user>a|b|"
    called = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    assert render(ASKING, [*called, {"role": "tool", "content": "rain"}]) == "<user>hi<assistant><tool>rain"
    results = {"role": "tool", "content": PARTS[0]["content"]}
    assert render(ASKING, [*called, results]) == "<user>hi<assistant><tool>a\nb"
    assert render(ASKING, PARTS, continue_final_message=True) == "<user>a|b"
    assert render(ASKING, content_format="openai") == "<user>hi|"


@pytest.mark.parametrize("asked", ["{% if m.content is string %}{{ m.content }}{% else %}%s{% endif %}", "%s"])
def test_a_system_message_has_one_part(asked: str) -> None:
    first = asked.replace("%s", "{{ m.content[0]['text'] }}").replace("m.", "messages[0].")
    loop = asked.replace("%s", "{% for p in m.content %}<{{ p.text }}>{% endfor %}")
    source = first + "|{% for m in messages[1:] %}" + loop + "{% endfor %}"
    messages = [PARTS[0] | {"role": "system"}, *PARTS]
    assert render(source, messages) == "a\nb|<a><b>"


@pytest.mark.parametrize(
    "source",
    [
        SIMPLE,
        "{% for m in messages %}{% for t in m.tool_calls or [] %}x{% endfor %}{{ m.content }}{% endfor %}",
        "{% for w in words or [] %}{{ w.content }}{% endfor %}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ],
)
def test_other_templates_get_a_string(source: str) -> None:
    assert "a\nb" in render(source, PARTS, add_generation_prompt=False)


def test_the_format_of_contents_can_be_set() -> None:
    shown = "{{ messages[0].content | tojson }}"
    assert render(shown, PARTS) == '"a\\nb"'
    assert render(shown, PARTS, content_format="openai") == json.dumps(PARTS[0]["content"])
    assert ChatTemplate(shown, TOKENIZER, "openai").render([USER]) == '[{"type": "text", "text": "hi"}]'
    assert ChatTemplate(shown, TOKENIZER, "openai").render([USER], content_format="string") == '"hi"'
    looping = ChatTemplate("{% for c in messages[0].content %}{{ c }}.{% endfor %}", TOKENIZER, "string")
    assert looping.render([USER]) == "h.i."


def test_the_messages_given_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    render(SIMPLE, messages, continue_final_message=True)
    assert json.dumps(messages) == before


def test_functions_that_templates_use() -> None:
    assert render("{{ {'b': '<ü>', 'a': 1} | tojson }}") == '{"b": "<ü>", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}") == '{"a": 2, "b": 1}'
    assert int(render("{{ strftime_now('%Y') }}")) > 2000
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c") == "ab2c"
    assert render("{{ documents is none }} {{ tools is none }}") == "True True"


def test_variables_of_the_request() -> None:
    source = "{{ enable_thinking }} {{ messages[0].content }} {{ tools is none }}"
    kwargs = {"enable_thinking": False, "messages": [], "tools": [1], "add_generation_prompt": False}
    assert render(source, template_kwargs=kwargs) == "False hi True"
    assert render(source, enable_thinking=True) == "True hi True"


def test_tools_choose_their_template() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T{{ tools | length }}"}, TOKENIZER)
    assert template.render([USER]) == "D"
    assert template.render([USER], tools=[{"type": "function"}]) == "T1"
    assert ChatTemplate("{{ tools | length }}", TOKENIZER).render([USER], tools=[{}, {}]) == "2"
    with pytest.raises(InvalidRequestError, match="no default chat template, only: rag"):
        ChatTemplate({"rag": "R"}, TOKENIZER).render([USER])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "list object has no element 5"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "not safely callable|immutable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|__class__"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_raises_is_the_requests_fault(source: str, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(ConfigError, match=r"not valid Jinja.*line 2"):
        ChatTemplate("ok\n{% if %}", TOKENIZER)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def first(override: str | None, tokenizer: Tokenizer = TOKENIZER) -> str:
        template = chat_template_of(tokenizer, override)
        assert template is not None
        return template.render([USER])

    (tmp_path / "t.jinja").write_text("from a file")
    assert first(None) == "model's own"
    assert first(str(tmp_path / "t.jinja")) == "from a file"
    assert first("{{ 'inline' }}") == "inline"
    assert chat_template_of(Tokenizer(toy_tokenizers.byte_level())) is None
    with pytest.raises(ConfigError, match=r"none\.jinja.*can't be read"):
        chat_template_of(TOKENIZER, str(tmp_path / "none.jinja"))


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert plain_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb\nc"
    assert plain_messages([{"role": "user", "content": []}])[0]["content"] == ""


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
def test_reasoning_has_the_name_that_the_template_reads(given: str, read: str) -> None:
    message = {"role": "assistant", "content": "a", given: "hm"}
    assert render(f"{{{{ messages[0].{read} }}}}", [message]) == "hm"
    assert render("{{ messages[0] | length }}", [message]) == "3"
    assert render(f"{{{{ messages[0].{read} is defined }}}}") == "False"


@pytest.mark.parametrize("said", ["é", "</s>"])
@pytest.mark.parametrize(
    "written",
    ["'<' + a + '>'", "'<' ~ a ~ '>'", "'<' + (a | tojson) + '>'", "'<' + (a if a is string else a | string) + '>'"],
)
def test_arguments_are_json_where_they_are_written_as_text(said: str, written: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": json.dumps({"a": said, "b": None})}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = (
        "{% set a = messages[1].tool_calls[0].function.arguments %}{{ a.a }}{{ a is mapping }}{{ " + written + " }}"
    )
    assert render(source, messages) == said + 'True<{"a": "' + said + '", "b": null}>'


def test_a_message_of_calls_has_no_content_where_the_template_asks_for_that() -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    asking = (
        "{% for m in messages %}{% if m['content'] is none %}({{ m.tool_calls[0].function.name }}){% endif %}"
        "{% if m['content'] is not none %}<{{ m['content'] }}>{% endif %}{% endfor %}"
    )
    assert render(asking, messages) == "<hi>(f)"
    assert render("{% for m in messages %}<{{ m.content + '.' }}>{% endfor %}{{ 1 is none }}", messages) == (
        "<hi.><.>False"
    )


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls_are_no_field(calls: Any) -> None:
    (message,) = plain_messages([{"role": "assistant", "content": "a", "tool_calls": calls}])
    assert message == {"role": "assistant", "content": "a"}


def test_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    plain = plain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]
    assert plain["content"] == ""
    assert plain["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert plain["tool_calls"][0]["id"] == "1"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (USER, "must be a list"),
        (None, "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": [{"words": "x"}]}], r"content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\[0\] must be"),
        ([{"role": "assistant", "tool_calls": {}, "content": None}], "content is missing"),
        ([{"role": "assistant", "tool_calls": [5]}], r"tool_calls\[0\]\.function must be"),
        ([{"role": "assistant", "tool_calls": "x"}], r"tool_calls must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"tool_calls\[0\]\.function\.arguments is not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
            r"tool_calls\[0\]\.function\.arguments is not valid JSON",
        ),
    ],
)
def test_messages_of_a_wrong_form_are_named(messages: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        plain_messages(messages)
    assert caught.value.param == "messages"


def test_parts_that_are_not_text_are_not_supported() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(UnsupportedError, match=r"messages\[0\]\.content\[0\] is of type 'image_url'"):
        plain_messages([{"role": "user", "content": [image]}])


def test_a_role_that_the_template_names_is_known() -> None:
    source = "{% for m in messages %}{% if m.role == 'humane' %}!{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, [{"role": "humane", "content": "hi"}]) == "!hi"
    assert render(SIMPLE, [{"role": "narrator", "content": "hi"}]).startswith("<s><narrator>hi")
    with pytest.raises(InvalidRequestError, match=r"did you mean assistant\? Roles are system, developer, user, assis"):
        render(SIMPLE, [{"role": "asistant", "content": "hi"}])
