"""Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from conftest import MODEL
from pydantic import BaseModel

ASK: Any = {
    "model": MODEL,
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "extra_body": {"temperature": 0},  # this client has no parameter for it
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    name: str
    rank: int


def asked(**changes: Any) -> Any:
    return {name: value for name, value in (ASK | changes).items() if value is not None}


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def aclient(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = list(client.models.list())
    assert (model.id, model.type) == (MODEL, "model")
    assert model.created_at.year > 2020
    assert client.models.retrieve(MODEL).display_name


def test_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**asked())
    assert answer.content[0].type == "text"
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 0
    assert answer._request_id


def test_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**asked())
    kinds = [event.type for event in client.messages.create(**asked(), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(**asked()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_async(aclient: anthropic.AsyncAnthropic) -> None:
    whole = await aclient.messages.create(**asked())
    async with aclient.messages.stream(**asked()) as stream:
        assert await stream.get_final_text() == whole.content[0].text


def test_system_blocks_and_turns(client: anthropic.Anthropic) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": "How are you?"},
    ]
    answer = client.messages.create(**asked(messages=turns, system=[{"type": "text", "text": "Be brief."}]))
    assert answer.role == "assistant"


def test_prefill(client: anthropic.Anthropic) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "The capital of France is"}]
    assert "Paris" in client.messages.create(**asked(messages=turns)).content[0].text


def test_stop_sequence(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**asked(stop_sequences=["Paris"]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools(client: anthropic.Anthropic, choice: Any) -> None:
    answer = client.messages.create(
        **asked(tools=[WEATHER], tool_choice=choice | {"disable_parallel_tool_use": True}, max_tokens=200)
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls
    assert answer.stop_reason == "tool_use"
    assert all(call.name == "get_weather" and set(call.input) == {"city"} for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"} for call in calls]
    turns = [*ASK["messages"], {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert client.messages.create(**asked(messages=turns, tools=[WEATHER])).type == "message"


def test_tools_streamed(client: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**asked(tools=[WEATHER], tool_choice=choice, max_tokens=200)) as stream:
        final = stream.get_final_message()
    (call,) = final.content
    assert call.type == "tool_use"
    assert set(call.input) == {"city"}


def test_parse(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(**asked(max_tokens=200, extra_body={}), output_format=City)
    assert isinstance(answer.parsed_output, City)


def test_thinking_budget(client: anthropic.Anthropic) -> None:
    """A model that does not think answers as it always does."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(**asked(max_tokens=1100, stop_sequences=["."]), thinking=thinking)
    assert answer.type == "message"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK["messages"], tools=[WEATHER])
    bare = client.messages.count_tokens(model=MODEL, messages=ASK["messages"])
    assert counted.input_tokens > bare.input_tokens > 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError),
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
    ],
)
def test_errors(client: anthropic.Anthropic, changes: Any, error: type[anthropic.APIStatusError]) -> None:
    with pytest.raises(error) as caught:
        client.messages.create(**asked(**changes))
    assert caught.value.body["type"] == "error"
    with pytest.raises(error):
        client.messages.create(**asked(**changes), stream=True)
