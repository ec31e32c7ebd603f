"""Anthropic's messages: translated into a chat, and the answer told in blocks and events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, Answer, ask_now, ids, saying
from test_tools import CALL, CLOCK_CALL, THINKING, WITH_TOOLS

from octavo.config import ServerConfig
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

PATH = "/v1/messages"
ASKED = {"model": "toy", "max_tokens": 200, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}


class Place:
    def __init__(self, text: str, template: str = WITH_TOOLS, config: ServerConfig | None = None) -> None:
        info = fake_info(name="toy", vocab_size=VOCAB_SIZE, features=["grammar"])
        self.engine = FakeEngine(saying(text), info=info)
        frontend = Frontend(self.engine, TOKENIZER, info, chat=ChatTemplate(template, TOKENIZER))
        self.app = create_app(frontend, config or ServerConfig())

    def ask(self, **fields: Any) -> Answer:
        return ask_now(self.app, PATH, ASKED | fields)

    def both(self, **fields: Any) -> dict[str, Any]:
        """The message, which must be the same streamed and whole."""
        answer = self.ask(**fields)
        assert answer.status == 200, answer.body
        whole: dict[str, Any] = answer.json()
        streamed = merged(self.ask(**fields, stream=True).body.decode())
        for one in (whole, streamed):
            assert one.pop("id").startswith("msg_")
            for block in one["content"]:
                block.pop("id", None)
        assert whole == streamed
        return whole

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.engine.requests[-1].tokens, skip_special_tokens=False)


_DELTAS = (
    ("text", "text"),
    ("thinking", "thinking"),
    ("signature", "signature"),
    ("input_json", "partial_json"),
)


def merged(text: str) -> dict[str, Any]:
    """As a client puts a stream together; asserts the order of its events."""
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append(value)
    assert events[0]["type"] == "message_start"
    assert events[-1] == {"type": "message_stop"}
    message: dict[str, Any] = events[0]["message"]
    open_: int | None = None
    for one in events[1:-1]:
        match one["type"]:
            case "content_block_start":
                assert open_ is None
                open_ = one["index"]
                assert open_ == len(message["content"])
                message["content"].append(one["content_block"])
            case "content_block_delta":
                assert open_ == one["index"]
                block, delta = message["content"][open_], one["delta"]
                for kind, field in _DELTAS:
                    if delta["type"] == f"{kind}_delta":
                        block[field] = block.get(field, "") + delta[field]
            case "content_block_stop":
                assert open_ == one["index"]
                open_ = None
            case "message_delta":
                message |= one["delta"]
                message["usage"] = one["usage"]
    assert open_ is None
    for block in message["content"]:
        if "partial_json" in block:
            written = block.pop("partial_json")
            block["input"] = json.loads(written) if written.endswith("}") else {}
    return message


def test_an_answer() -> None:
    message = Place("Hi there.").both()
    assert message["content"] == [{"type": "text", "text": "Hi there."}]
    assert (message["role"], message["model"], message["type"]) == ("assistant", "toy", "message")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["output_tokens"] == len("Hi there.") + 1
    assert message["usage"]["input_tokens"] == len("[user]Hello\n[assistant]")


def test_ends() -> None:
    place = Place("Hi there.")
    assert place.both(max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = place.both(stop_sequences=["the"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "the")
    assert Place("").both()["content"] == [{"type": "text", "text": ""}]


@pytest.mark.features("grammar")
def test_calls_are_blocks() -> None:
    message = Place("So:\n" + CALL + "\n" + CLOCK_CALL).both(tools=[TOOL, CLOCK])
    assert message["content"] == [
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "clock", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    named = Place(CALL).both(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert named["stop_reason"] == "tool_use"


@pytest.mark.features("grammar")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": CALL.index("ris")}, "max_tokens"),
        ({"stop_sequences": ["ris"]}, "stop_sequence"),
        ({"stop_token_ids": ids("P")}, "end_turn"),
    ],
)
def test_a_call_that_is_cut_off_is_not_ready_for_use(fields: dict[str, Any], reason: str) -> None:
    message = Place(CALL).both(tools=[TOOL], **fields)
    assert message["content"] == [{"type": "tool_use", "name": "weather", "input": {}}]
    assert message["stop_reason"] == reason


def test_thinking_is_a_block() -> None:
    message = Place("hm</think>Yes.", THINKING).both()
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "octavo"},
        {"type": "text", "text": "Yes."},
    ]
    place = Place("Yes.", THINKING)
    place.both(thinking={"type": "disabled"})
    assert not place.prompt.endswith("<think>\n")


def test_thinking_that_is_not_to_be_shown_is_left_out() -> None:
    message = Place("hm</think>Yes.", THINKING).both(thinking={"type": "adaptive", "display": "omitted"})
    assert message["content"] == [{"type": "text", "text": "Yes."}]


def test_the_template_gets_the_effort() -> None:
    template = "{{ reasoning_effort | default('usual') }}{% if enable_thinking is false %}!{% endif %}"
    given = (
        ({}, "usual"),
        ({"output_config": {"effort": None}}, "usual"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "low"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "none!"),
    )
    for fields, prompt in given:
        place = Place("x", template)
        place.both(**fields)
        assert place.prompt == prompt
        counted = ask_now(place.app, PATH + "/count_tokens", {"messages": ASKED["messages"], **fields})
        assert counted.json() == {"input_tokens": len(prompt)}


def test_what_has_no_effect_is_said() -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    fields = {"output_config": {"task_budget": {"total": 9}}, "context_management": edits, "speed": "fast"}
    warnings = [
        f"The unknown field `{name}` was ignored." for name in ("output_config.task_budget", "context_management")
    ]
    place = Place("x")
    assert place.ask(**fields).json()["warnings"] == warnings
    frames = place.ask(**fields, stream=True).body.decode().split("\n\n")
    ends = [json.loads(frame.partition("data: ")[2]) for frame in frames if "event: message_delta" in frame]
    assert [one["warnings"] for one in ends] == [warnings]
    for nothing in (None, {}, {"edits": []}):
        assert "warnings" not in place.ask(context_management=nothing, container=None).json()
    strict = Place("x", config=ServerConfig(strict_params=True)).ask(**fields)
    assert (strict.status, strict.json()["error"]["param"]) == (400, "output_config.task_budget")


def test_the_conversation_is_translated() -> None:
    calls = "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
    place = Place(
        "x", "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + calls + "{% endfor %}{{ '!' if tools }}"
    )
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    assert place.ask(messages=blocks, system=system, metadata={"user_id": "u"}).status == 200
    assert place.prompt == "[system]Be kind.[user]a\nb[assistant]look(weather Rome)[tool]rain[user]and?"


@pytest.mark.parametrize("blocks", [True, False])
def test_a_billing_line_does_not_change_the_prompt(blocks: bool) -> None:
    account, rest = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;", "Be kind.\nx-anthropic-billing-header: 1"
    place = Place("x")
    parts = [{"type": "text", "text": text} for text in (account, rest)]
    assert place.ask(system=parts if blocks else f"{account}\n{rest}").status == 200
    assert place.prompt == f"[system]{rest}\n[user]Hello\n[assistant]"
    assert place.ask(system=parts[:1] if blocks else account).status == 200
    assert place.prompt == "[user]Hello\n[assistant]"


def test_all_thinking_of_a_message_goes_back_to_the_model() -> None:
    place = Place("x", "{% for m in messages %}[{{ m.role }}]({{ m.reasoning_content }}){{ m.content }}{% endfor %}")
    thoughts = [{"type": "thinking", "thinking": text, "signature": "octavo"} for text in ("hm", "so")]
    turns = [{"role": "assistant", "content": [*thoughts, {"type": "text", "text": "a"}]}]
    assert place.ask(messages=[*ASKED["messages"], *turns, *ASKED["messages"]]).status == 200
    assert place.prompt == "[user]()Hello[assistant](hm\nso)a[user]()Hello"


def test_an_answer_that_is_begun_goes_on() -> None:
    place = Place(" fine.")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am"}]
    assert place.both(messages=messages)["content"] == [{"type": "text", "text": " fine."}]
    assert place.prompt.endswith("[assistant]I am")


@pytest.mark.features("grammar")
def test_a_form_of_output() -> None:
    place = Place("{}")
    place.both(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert "grammar" in place.engine.requests[-1].options


def test_tokens_are_counted() -> None:
    place = Place("x")
    body = {name: ASKED[name] for name in ("model", "messages")}
    answer = ask_now(place.app, PATH + "/count_tokens", body)
    assert answer.json() == {"input_tokens": len("[user]Hello\n[assistant]")}
    long = ask_now(place.app, PATH + "/count_tokens", {"messages": [{"role": "user", "content": "a" * 2000}]})
    assert long.json() == {"input_tokens": 2000 + len("[user]\n[assistant]")}  # the context has 1,024
    assert not place.engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": 9.0}, "temperature"),
        ({"system": 3}, "system"),
        ({"n": 2}, "n"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"container": {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}}, "container"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_form(fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = Place("x").ask(**fields, stream=stream)
    assert answer.status == 400
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert str(error["error"]["param"]).startswith(param)


def test_an_unknown_model_and_a_late_failure() -> None:
    place = Place("Hello")
    missing = place.ask(model="other")
    assert (missing.status, missing.json()["error"]["type"]) == (404, "not_found_error")

    generate = place.engine.generate

    async def dying(request: Any) -> Any:
        async for delta in generate(request):
            yield delta
            raise RuntimeError("secret")

    place.engine.generate = dying  # type: ignore[method-assign]
    text = place.ask(stream=True).body.decode()
    assert text.startswith("event: message_start\n")
    assert "event: error\n" in text
    assert "[DONE]" not in text
    assert "secret" not in text
