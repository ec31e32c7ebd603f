"""Whatever a model says, a stream put together is the whole answer: at every endpoint that generates.

The output is random: reasoning, text in many scripts, calls well formed and broken, marks and halves of marks. The
engine gives it out byte by byte, so that characters, marks and stop strings are cut everywhere.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, Answer, ask_now, ids

from octavo.config import ServerConfig
from octavo.core.request import GenerateRequest
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.answers.formats import AnswerFormats
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend
from octavo.text.tools.formats import FORMATS

TEMPLATE = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{# tools #}", TOKENIZER)
NAMES = ("weather", "clock")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]


class Places:
    """One app for each way in which models write calls; what it says is set for each question."""

    def __init__(self) -> None:
        self.says = ""
        self._apps: dict[str, Any] = {}

    def app(self, tools: str) -> Any:
        if tools not in self._apps:
            info = fake_info(name="toy", vocab_size=VOCAB_SIZE, max_model_len=4096, features=["grammar"])
            answers = AnswerFormats.of(TEMPLATE, tools=tools, reasoning="think")
            engine = FakeEngine(self._script, info=info)
            frontend = Frontend(engine, TOKENIZER, info, chat=TEMPLATE, answers=answers)
            self._apps[tools] = create_app(frontend, ServerConfig(max_stop_strings=8))
        return self._apps[tools]

    def _script(self, request: GenerateRequest) -> list[int]:
        return ids(self.says)


PLACES = Places()

odd = st.sampled_from(
    ["<", "</", "{", "}", '"', "\\", "\n", "[", "<tool_call>", "<think>", "</think>", "[ARGS]", "\u2028"]
)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
texts = st.lists(st.one_of(words, odd, st.sampled_from([" ", "é", "日本", "😀", "x\u0301"])), max_size=6).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=4,
)
arguments = st.dictionaries(texts, values, max_size=2).map(lambda value: json.dumps(value, ensure_ascii=False))


@st.composite
def outputs(draw: st.DrawFn, tools: str) -> str:
    form = FORMATS[tools]
    said = f"<think>{draw(texts)}</think>\n" if draw(st.booleans()) else ""
    said += draw(texts)
    calls = [form.write(draw(st.sampled_from(NAMES)), draw(arguments)) for _ in range(draw(st.integers(0, 2)))]
    if calls:
        said += form.group_open + form.separator.join(calls) + form.group_close
    said += draw(st.sampled_from(["", "tail", "\n"]))
    cut = draw(st.integers(0, len(said))) if draw(st.integers(0, 3)) == 0 else len(said)  # as `max_tokens` does
    return said[:cut] or "x"


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Any, list[str]]:
    """An app that has something to say, and stop strings, some of which are in it."""
    tools = draw(st.sampled_from(sorted(FORMATS)))
    PLACES.says = draw(outputs(tools))
    start = draw(st.integers(0, len(PLACES.says) - 1))
    inner = PLACES.says[start : start + draw(st.integers(1, 3))]
    return PLACES.app(tools), draw(st.sampled_from([[], [], [inner], [inner, "never said"]]))


def whole_and_events(app: Any, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    whole = ask_now(app, path, body)
    assert whole.status == 200, whole.body
    return whole.json(), events_of(ask_now(app, path, body | {"stream": True}))


def events_of(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    lines = answer.body.decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


quick = settings(max_examples=40, deadline=None)


@pytest.mark.features("grammar")
@quick
@given(asked=conversations())
def test_chat(asked: tuple[Any, list[str]]) -> None:
    app, stop = asked
    body = HELLO | {"tools": TOOLS, "stop": stop, "logprobs": True, "stream_options": None}
    whole, events = whole_and_events(app, "/v1/chat/completions", body)
    (choice,) = whole["choices"]
    told: dict[str, str] = {"content": "", "reasoning": ""}
    calls: list[list[str]] = []
    logprobs: list[Any] = []
    end = None
    for event in events:
        (part,) = event["choices"]
        assert end is None, "a choice went on after its end"
        for name in told:
            told[name] += part["delta"].get(name) or ""
        for call in part["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            assert call["index"] == len(calls) - 1
            calls[-1][1] += call["function"]["arguments"]
        logprobs += (part["logprobs"] or {"content": []})["content"]
        if part["finish_reason"]:
            end = (part["finish_reason"], part["stop_reason"])
    message = choice["message"]
    assert told == {name: message.get(name) or "" for name in told}
    assert calls == [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    assert end == (choice["finish_reason"], choice["stop_reason"])
    assert logprobs == choice["logprobs"]["content"]


@quick
@given(asked=conversations())
def test_completions(asked: tuple[Any, list[str]]) -> None:
    app, stop = asked
    body = {"prompt": "a", "stop": stop, "max_tokens": 4000, "logprobs": 1}
    whole, events = whole_and_events(app, "/v1/completions", body)
    (choice,) = whole["choices"]
    parts = [part for event in events for part in event["choices"]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
    tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
    assert tokens == choice["logprobs"]["tokens"]
    cuts = [PLACES.says.find(one) for one in stop if one in PLACES.says]
    assert choice["text"] == (PLACES.says[: min(cuts)] if cuts else PLACES.says)


@pytest.mark.features("grammar")
@quick
@given(asked=conversations())
def test_responses(asked: tuple[Any, list[str]]) -> None:
    app, stop = asked
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    body = {"input": "Hello", "tools": tools, "stop": stop, "store": False}
    whole, events = whole_and_events(app, "/v1/responses", body)
    told: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            told[event["output_index"]] = told.get(event["output_index"], "") + event["delta"]
    assert [told.get(number, "") for number in range(len(whole["output"]))] == [said(item) for item in whole["output"]]
    last = events[-1]["response"]
    assert [said(item) for item in last["output"]] == [said(item) for item in whole["output"]]
    assert (last["status"], last["usage"]) == (whole["status"], whole["usage"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def said(item: dict[str, Any]) -> str:
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@pytest.mark.features("grammar")
@quick
@given(asked=conversations())
def test_messages(asked: tuple[Any, list[str]]) -> None:
    app, stop = asked
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    body = HELLO | {"max_tokens": 4000, "tools": tools, "stop_sequences": stop}
    whole, events = whole_and_events(app, "/v1/messages", body)
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
            assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            match event["delta"]:
                case {"type": "text_delta", "text": text}:
                    blocks[-1]["text"] += text
                case {"type": "thinking_delta", "thinking": text}:
                    blocks[-1]["thinking"] += text
                case {"type": "input_json_delta", "partial_json": text}:
                    blocks[-1]["json"] += text
    assert [plain(block) for block in blocks] == [plain(block) for block in whole["content"]]
    end = events[-2]
    assert end["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def plain(block: dict[str, Any]) -> tuple[str, Any]:
    kind = block["type"]
    if kind != "tool_use":
        return kind, block["text" if kind == "text" else "thinking"]
    if "json" not in block:
        return block["name"], block["input"]
    try:
        return block["name"], json.loads(block["json"])
    except ValueError:
        return block["name"], {}


@pytest.mark.features("grammar")
@pytest.mark.parametrize("tools", sorted(FORMATS))
def test_calls_that_are_well_formed_are_found(tools: str) -> None:
    form = FORMATS[tools]
    PLACES.says = form.group_open + form.write("weather", '{"city": "日\\"}"}') + form.group_close
    message = ask_now(PLACES.app(tools), "/v1/chat/completions", HELLO | {"tools": TOOLS}).json()["choices"][0][
        "message"
    ]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "日\\"}"}'}
    ]
