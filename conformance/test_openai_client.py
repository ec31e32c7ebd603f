"""OpenAI's own client: what its methods promise, sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from conftest import MODEL
from pydantic import BaseModel

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
GREEDY: Any = ASK | {"temperature": 0, "max_tokens": 24}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    name: str
    size: Literal["small", "large"]
    rank: int


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def aclient(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == [whole.choices[0].finish_reason]


async def test_chat_async(aclient: openai.AsyncOpenAI) -> None:
    whole = await aclient.chat.completions.create(**GREEDY)
    text = ""
    async for chunk in await aclient.chat.completions.create(**GREEDY, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content


async def test_many_at_once(aclient: openai.AsyncOpenAI) -> None:
    answers = await asyncio.gather(*(aclient.chat.completions.create(**GREEDY) for _ in range(16)))
    assert {answer.choices[0].finish_reason for answer in answers} <= {"stop", "length"}


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == client.chat.completions.create(**GREEDY).choices[0].message.content


async def test_stream_helper_async(aclient: openai.AsyncOpenAI) -> None:
    async with aclient.chat.completions.stream(**GREEDY, n=1) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.role == "assistant"


def test_a_stream_left_early(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**ASK, stream=True, max_tokens=200) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**GREEDY).choices


def test_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, n=3, seed=1, max_tokens=8, logprobs=True, top_logprobs=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(entry.top_logprobs) == 4 and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_seed_and_stop(client: openai.OpenAI) -> None:
    asked = ASK | {"seed": 7, "temperature": 1, "max_tokens": 12}
    first, second = (client.chat.completions.create(**asked).choices[0].message.content for _ in range(2))
    assert first == second
    stopped = client.chat.completions.create(**GREEDY, stop=["Paris"]).choices[0]
    assert "Paris" not in (stopped.message.content or "")
    assert stopped.finish_reason == "stop"


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ASK, response_format=City, seed=3, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, City)


async def test_parse_async_and_streamed(aclient: openai.AsyncOpenAI) -> None:
    asked = ASK | {"response_format": City, "seed": 3, "max_tokens": 200}
    whole = await aclient.chat.completions.parse(**asked)
    async with aclient.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, response_format={"type": "json_object"}, max_tokens=400, seed=2)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    asked = ASK | {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_tool_calls_streamed_by_helper(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(City)
    asked = ASK | {"tools": [tool], "tool_choice": "required", "max_tokens": 200, "seed": 5}
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)


def test_a_round_with_a_tool(client: openai.OpenAI) -> None:
    asked = ASK | {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    turns = [*ASK["messages"], message, result]
    answer = client.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER], max_tokens=16)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_completions(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "One, two,"]
    whole = client.completions.create(model=MODEL, prompt=prompts, max_tokens=5, temperature=0, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert "Paris" in whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) == 5
    stream = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    echoed = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=1, echo=True)
    assert echoed.choices[0].text.startswith(prompts[0])


def test_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY, extra_headers={"X-Request-Id": "abc"})
    assert raw.headers["x-request-id"] == "abc"
    assert raw.parse()._request_id == "abc"
    with client.chat.completions.with_streaming_response.create(**GREEDY) as response:
        assert b"Paris" in b"".join(response.iter_bytes())


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"model": "nobody"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, openai.BadRequestError, None),
    ],
)
def test_errors(client: openai.OpenAI, changes: Any, error: type[openai.APIStatusError], param: str | None) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**GREEDY | changes)
    assert param is None or caught.value.param == param
    with pytest.raises(error):
        client.chat.completions.create(**GREEDY | changes, stream=True)


def test_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    after = client.responses.create(**asked | {"input": "And of Italy?"}, previous_response_id=whole.id)
    assert after.previous_response_id == whole.id
    assert len(client.responses.input_items.list(after.id).data) == 3
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_responses_stream_helper(client: openai.OpenAI) -> None:
    # This helper takes `response.incomplete` for no end, so the answer must not be cut off.
    with client.responses.stream(model=MODEL, input="Say hello.", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text


def test_responses_parse(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="Name a city.", text_format=City, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(model=MODEL, input="Name a city.", text_format=City, max_output_tokens=200) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_responses_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function"} | WEATHER["function"]
    asked: Any = {"model": MODEL, "tools": [tool], "parallel_tool_calls": False, "max_output_tokens": 200}
    first = client.responses.create(**asked, input="The weather in Paris?", tool_choice="required")
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    client.responses.create(**asked, input=[output], previous_response_id=first.id, tool_choice="none")
    with client.responses.stream(**asked, input="The weather in Paris?", tool_choice="required") as stream:
        kinds = {event.type for event in stream}
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds


async def test_responses_in_background(aclient: openai.AsyncOpenAI) -> None:
    made = await aclient.responses.create(model=MODEL, input="Count.", background=True, max_output_tokens=2000)
    assert made.status in ("queued", "in_progress")
    assert (await aclient.responses.cancel(made.id)).status == "cancelled"
    short = await aclient.responses.create(model=MODEL, input="Count.", background=True, max_output_tokens=3)
    while short.status in ("queued", "in_progress"):
        short = await aclient.responses.retrieve(short.id)
    assert short.status in ("completed", "incomplete")
