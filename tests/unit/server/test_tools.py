"""Tool calls and reasoning over HTTP: what the model is told, what the engine is asked, how the answer is sorted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, Answer, ask_now, ids, saying

from octavo.config import ServerConfig
from octavo.core.structured import StructuredOutputsParams
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.answers.formats import AnswerFormats
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + PLAIN
THINKING = "{# </think> #}" + WITH_TOOLS + "{% if enable_thinking is not defined %}<think>\n{% endif %}"
ASKED = HELLO | {"tools": [TOOL, CLOCK]}


class Place:
    def __init__(self, text: str, template: str = WITH_TOOLS) -> None:
        info = fake_info(name="toy", vocab_size=VOCAB_SIZE, features=["grammar"])
        self.engine = FakeEngine(saying(text), info=info)
        frontend = Frontend(self.engine, TOKENIZER, info, chat=ChatTemplate(template, TOKENIZER))
        self.app = create_app(frontend, ServerConfig())

    def ask(self, body: dict[str, Any]) -> Answer:
        return ask_now(self.app, "/v1/chat/completions", body)

    def both(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The message and its finish reason, which must be the same streamed and whole."""
        whole = self.ask(body)
        assert whole.status == 200, whole.body
        (choice,) = whole.json()["choices"]
        streamed = merged(self.ask(body | {"stream": True}).events())
        message = choice["message"]
        for call, other in zip(message.get("tool_calls", []), streamed[0].get("tool_calls", []), strict=True):
            assert call.pop("id") != other.pop("id")
        assert message.get("reasoning") == message.get("reasoning_content")
        assert {k: v for k, v in message.items() if v and k != "role"} == streamed[0]
        assert choice["finish_reason"] == streamed[1]
        return message, choice["finish_reason"]

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.engine.requests[-1].tokens, skip_special_tokens=False)

    @property
    def form(self) -> StructuredOutputsParams | None:
        raw = self.engine.requests[-1].options.get("grammar")
        return None if raw is None else msgspec.msgpack.decode(raw, type=StructuredOutputsParams)


def merged(events: list[Any]) -> tuple[dict[str, Any], str]:
    """As a client puts a stream together."""
    message: dict[str, Any] = {}
    finish = ""
    for one in events:
        for choice in one["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "function": {"name": "", "arguments": ""}, "type": call["type"]})
                    calls[-1]["function"]["name"] = call["function"]["name"]
                else:
                    assert "id" not in call
                    assert "name" not in call["function"]
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return message, finish


def function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.features("grammar")
def test_a_call_is_a_call_and_content_is_content() -> None:
    message, finish = Place("Let me see.\n" + CALL + "\n" + CLOCK_CALL).both(ASKED)
    assert message["content"] == "Let me see."
    assert message["tool_calls"] == [function("weather", '{"city": "Paris"}'), function("clock", "{}")]
    assert finish == "tool_calls"
    message, finish = Place("Just 2 < 3 <tool_cal words").both(ASKED)
    assert (message["content"], finish) == ("Just 2 < 3 <tool_cal words", "stop")
    assert "tool_calls" not in message


@pytest.mark.features("grammar")
def test_calls_alone_have_null_content() -> None:
    message, _ = Place(CALL).both(ASKED)
    assert message["content"] is None


@pytest.mark.features("grammar")
def test_a_named_call_stops_and_a_required_one_is_a_reason() -> None:
    place = Place(CALL)
    named = {"type": "function", "function": {"name": "weather"}}
    assert place.both(ASKED | {"tool_choice": named})[1] == "stop"
    form = place.form
    assert form is not None
    assert "weather" in str(form.frame)
    assert '"clock"' not in str(form.frame)
    assert place.both(ASKED | {"tool_choice": "required"})[1] == "tool_calls"


@pytest.mark.features("grammar")
def test_a_call_cut_short_ends_by_length() -> None:
    message, finish = Place(CALL).both(ASKED | {"max_tokens": CALL.index("ris")})
    assert finish == "length"
    assert message["tool_calls"] == [function("weather", '{"city": "Pa')]


@pytest.mark.features("grammar")
@pytest.mark.parametrize("stop", [{"stop": "Pa"}, {"stop_token_ids": ids("P")}])
def test_a_call_that_a_stop_cuts_off_is_no_finished_call(stop: dict[str, Any]) -> None:
    message, finish = Place(CALL).both(ASKED | stop)
    assert message["tool_calls"] == [function("weather", '{"city": "')]
    assert finish == "stop"
    message, finish = Place(CALL).both(ASKED | {"stop": "}\n</tool"})
    assert message["tool_calls"] == [function("weather", '{"city": "Paris"}')]
    assert finish == "tool_calls"
    message, finish = Place(f"{CALL}\n{CLOCK_CALL}").both(ASKED | {"stop": "lock"})
    assert message["tool_calls"] == [function("weather", '{"city": "Paris"}')]
    assert finish == "tool_calls"


@pytest.mark.features("grammar")
def test_the_template_is_told_of_tools_or_it_is_said_in_words() -> None:
    place = Place("x")
    place.ask(ASKED)
    assert json.loads(place.prompt.partition("<tool_call>")[0])[0] == TOOL
    plain = Place("x", PLAIN)
    described = plain.ask(ASKED).json()
    assert "does not support `tools`" in described["warnings"][0]
    assert "warnings" not in place.ask(ASKED).json()
    assert "warnings" not in plain.ask(ASKED | {"tool_choice": "none"}).json()
    plain.ask(ASKED)
    assert plain.prompt.startswith("[system]")
    assert '"name": "weather"' in plain.prompt
    assert "<tool_call>" in plain.prompt
    plain.ask(ASKED | {"messages": [{"role": "system", "content": "Be kind."}, *HELLO["messages"]]})
    assert plain.prompt.startswith("[system]Be kind.\n\nYou can call")


def test_no_choice_no_tools() -> None:
    place = Place(CALL)
    message, _ = place.both(ASKED | {"tool_choice": "none"})
    assert message["content"] == CALL
    assert "weather" not in place.prompt
    assert place.form is None


def test_past_calls_reach_every_template() -> None:
    past = [
        *HELLO["messages"],
        {"role": "assistant", "tool_calls": [{"id": "call_1"} | function("weather", '{"city": "Rome"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    plain = Place("x", PLAIN)
    assert plain.ask({"messages": past}).status == 200
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in plain.prompt
    assert "rain" in plain.prompt
    calls = "{{ m.tool_calls[0].function.arguments.city if m.tool_calls }}"
    template = "{% for m in messages %}{{ m.role }}" + calls + "{{ m.content }};{% endfor %}{{ tools }}"
    told = Place("x", template)
    assert told.ask({"messages": past}).status == 200
    assert told.prompt == "userHello;assistantRome;toolrain;None"


@pytest.mark.features("grammar")
def test_types_of_arguments_have_their_json_names() -> None:
    place = Place("x")
    function = {"name": "f", "parameters": {"type": "dict", "properties": {"a": {"type": "float"}}}}
    assert place.ask(HELLO | {"tools": [{"type": "function", "function": function}]}).status == 200
    assert '"number"' in TOKENIZER.decode(place.engine.requests[-1].tokens)
    strict = {"type": "function", "function": function | {"strict": True}}
    assert place.ask(HELLO | {"tools": [strict]}).error()["param"] == "tools.0.function.parameters"


@pytest.mark.parametrize("template", [PLAIN, WITH_TOOLS], ids=["in-words", "by-the-template"])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({}, "messages[1].tool_calls[0].function must be an object with name and arguments."),
        ({"function": {"arguments": "{}"}}, "messages[1].tool_calls[0].function.name must be the name of a function."),
        (
            {"function": {"name": "f", "arguments": "{"}},
            "messages[1].tool_calls[0].function.arguments is not valid JSON: ",
        ),
    ],
)
def test_a_past_call_without_its_parts_is_refused(template: str, call: dict[str, Any], said: str) -> None:
    past = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    answer = Place("Hi.", template).ask(HELLO | {"messages": past})
    assert (answer.status, answer.error()["param"]) == (400, "messages")
    assert answer.error()["message"].startswith(said)


def test_reasoning_has_a_field_of_its_own() -> None:
    place = Place("I wonder.\n</think>\n\nYes.", THINKING)
    message, _ = place.both(HELLO)
    assert (message["reasoning"], message["content"]) == ("I wonder.", "Yes.")
    assert place.form is None
    usage = place.ask(HELLO).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("I wonder.\n</think>")}
    hidden = place.ask(HELLO | {"include_reasoning": False}).json()["choices"][0]["message"]
    assert "reasoning" not in hidden
    assert hidden["content"] == "Yes."


def test_reasoning_that_never_ends_is_all_reasoning() -> None:
    message, finish = Place("I wonder and wonder", THINKING).both(HELLO | {"max_tokens": 8})
    assert (message["reasoning"], message["content"], finish) == ("I wonder", None, "length")


def test_an_effort_of_none_asks_the_template_not_to_think() -> None:
    place = Place("<think>\nso</think>Yes.", THINKING)
    message, _ = place.both(HELLO | {"reasoning_effort": "none"})
    assert not place.prompt.endswith("<think>\n")
    assert (message["reasoning"], message["content"]) == ("so", "Yes.")
    message, _ = Place("Yes.", THINKING).both(HELLO | {"chat_template_kwargs": {"enable_thinking": False}})
    assert (message["reasoning"], message["content"]) == (None, "Yes.")


@pytest.mark.features("grammar")
def test_reasoning_then_a_call() -> None:
    place = Place("hm</think>\n\n" + CALL, THINKING)
    message, finish = place.both(ASKED)
    assert (message["reasoning"], finish) == ("hm", "tool_calls")
    assert message["tool_calls"] == [function("weather", '{"city": "Paris"}')]


@pytest.mark.features("grammar")
def test_logprobs_are_of_all_tokens() -> None:
    answer = Place(CALL).ask(ASKED | {"logprobs": True}).json()["choices"][0]
    assert "".join(entry["token"] for entry in answer["logprobs"]["content"]).startswith(CALL)
    assert len(ids(CALL)) + 1 == len(answer["logprobs"]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web"}]}, "tools.0.function"),
        ({"tools": [TOOL | {"type": "web"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"maxProperties": None}}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"function": 5}]}},
            "tool_choice",
        ),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    answer = Place("x").ask(HELLO | fields)
    assert answer.status == 400
    assert answer.error()["param"] == param


@pytest.mark.features("grammar")
def test_allowed_tools_narrow_the_choice() -> None:
    place = Place(CLOCK_CALL)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    message, _ = place.both(ASKED | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}})
    assert message["tool_calls"] == [function("clock", "{}")]
    assert "weather" in place.prompt
    assert '"weather"' not in str(place.form.frame if place.form else "")


def test_a_message_of_calls_has_no_content() -> None:
    asking = "{{ tools or '' }}{% for m in messages %}{{ '(calls)' if m.content is none else m.content }}{% endfor %}"
    calls = [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]
    for content in ({}, {"content": None}):
        messages = [*HELLO["messages"], {"role": "assistant", "tool_calls": calls, **content}]
        place = Place("x", asking)
        assert place.ask({"messages": [*messages, {"role": "tool", "tool_call_id": "c", "content": "1"}]}).status == 200
        assert place.prompt == "Hello(calls)1"


REQUIRED = {"tool_choice": "required"}


@pytest.mark.features("grammar")
def test_a_call_that_is_required_and_repeated_ends_the_answer() -> None:
    place = Place("\n".join([CALL, CLOCK_CALL, CALL, CALL, CLOCK_CALL]))
    message, finish = place.both(ASKED | REQUIRED)
    assert message["tool_calls"] == [function("weather", '{"city": "Paris"}'), function("clock", "{}")]
    assert finish == "tool_calls"
    told = place.ask(ASKED | REQUIRED).json()["usage"]["completion_tokens"]
    upto = len("\n".join([CALL, CLOCK_CALL, CALL])) - len("\n</tool_call>") - 1  # where the repetition is seen
    assert told <= upto + 1


@pytest.mark.features("grammar")
@pytest.mark.parametrize("stop", [None, "never said"])
@pytest.mark.parametrize("least", [len(CALL) // 2, 5 * len(CALL)])
def test_a_repeated_call_ends_the_answer_before_its_least_length(least: int, stop: str | None) -> None:
    place = Place("\n".join([CALL] * 40))
    asked = ASKED | REQUIRED | {"min_tokens": least, "max_tokens": 7 * len(CALL), "stop": stop}
    message, finish = place.both(asked)
    assert message["tool_calls"] == [function("weather", '{"city": "Paris"}')]
    assert finish == "tool_calls"
    assert place.ask(asked).json()["usage"]["completion_tokens"] < 2 * len(CALL) + len("never said")


@pytest.mark.features("grammar")
def test_only_the_choice_that_repeats_a_call_is_ended() -> None:
    place = Place("")
    circles, other = "\n".join([CLOCK_CALL] * 9), f"{CALL}\n{CLOCK_CALL}"
    place.engine = FakeEngine(saying(circles, other), info=place.engine.info)
    frontend = Frontend(place.engine, TOKENIZER, place.engine.info, chat=ChatTemplate(WITH_TOOLS, TOKENIZER))
    place.app = create_app(frontend, ServerConfig())
    answer = place.ask(ASKED | REQUIRED | {"n": 2}).json()
    calls = [[call["function"]["name"] for call in one["message"]["tool_calls"]] for one in answer["choices"]]
    assert calls == [["clock"], ["weather", "clock"]]
    assert place.engine.aborts == [(place.engine.requests[0].id, 0)]


@pytest.mark.features("grammar")
def test_a_call_that_is_free_may_be_repeated() -> None:
    message, finish = Place(f"{CLOCK_CALL}\n{CLOCK_CALL}").both(ASKED)
    assert message["tool_calls"] == [function("clock", "{}")] * 2
    assert finish == "tool_calls"


@pytest.mark.features("grammar")
def test_a_format_that_a_user_declares(tmp_path: Path) -> None:
    declared = 'ToolFormat(name="mine", trigger="<fn>", call_open="<fn>", name_close="|", call_close="</fn>")'
    (tmp_path / "mine.py").write_text(f"from octavo.text.tools.formats import ToolFormat\nMINE = {declared}\n")
    place = Place('Let me see. <fn>weather|{"city": "Paris"}</fn>\n<fn>clock|{}</fn>')
    answers = AnswerFormats.of(None, tools="mine", plugin=str(tmp_path / "mine.py"))
    frontend = Frontend(
        place.engine, TOKENIZER, place.engine.info, chat=ChatTemplate(PLAIN, TOKENIZER), answers=answers
    )
    place.app = create_app(frontend, ServerConfig())
    message, finish = place.both(ASKED)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [("weather", '{"city": "Paris"}'), ("clock", "{}")]
    assert (message["content"].strip(), finish) == ("Let me see.", "tool_calls")
    assert place.form is not None
    assert "<fn>" in str(place.form.frame)
