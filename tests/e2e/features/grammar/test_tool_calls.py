"""Tool calls of the real model behind the real processes, asked by the openai client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from serving import Server, together

pytestmark = pytest.mark.e2e

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
ASKED: Any = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": TOOLS,
    "temperature": 1,
    "max_tokens": 160,
}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def check(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_required_calls_are_made_and_valid(client: openai.OpenAI) -> None:
    asked: Any = ASKED | {"tool_choice": "required", "parallel_tool_calls": False}
    answers: list[Any] = together(lambda seed: client.chat.completions.create(**asked, seed=seed), range(6))
    for answer in answers:
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        check(call)


def test_the_named_function_is_called_and_its_result_goes_back(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(**ASKED, tool_choice=named, seed=1)
    assert answer.choices[0].message.tool_calls
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    check(call)
    more = [
        *ASKED["messages"],
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
    ]
    last = client.chat.completions.create(**ASKED | {"messages": more, "max_tokens": 20}, tool_choice="none")
    assert last.choices[0].message.content


def joined(chunks: Any) -> tuple[str | None, list[tuple[str, str]]]:
    """A stream's finish reason, and the names and arguments of the calls in it."""
    names: list[str] = []
    arguments: list[str] = []
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.index == len(names):
                    assert call.id
                    names.append(call.function.name or "")
                    arguments.append("")
                arguments[call.index] += call.function.arguments or ""
    return finish, list(zip(names, arguments, strict=True))


def test_a_stream_joined_is_the_whole(client: openai.OpenAI) -> None:
    def made(asked: tuple[int, bool]) -> tuple[str | None, list[tuple[str, str]]]:
        seed, stream = asked
        body: Any = ASKED | {"seed": seed, "tool_choice": "required", "max_tokens": 100}
        if stream:
            return joined(client.chat.completions.create(**body, stream=True))
        choice = client.chat.completions.create(**body).choices[0]
        calls: list[Any] = choice.message.tool_calls or []
        return choice.finish_reason, [(call.function.name, call.function.arguments) for call in calls]

    seeds = range(3)
    found = together(made, [(seed, stream) for stream in (False, True) for seed in seeds])
    assert found[3:] == found[:3]


def test_free_choice_gives_text_or_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED | {"max_tokens": 40}, seed=4)
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    for call in message.tool_calls or []:
        if answer.choices[0].finish_reason == "tool_calls":
            check(call)


def test_a_strict_schema_that_cannot_be_enforced_is_refused(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="not") as caught:
        client.chat.completions.create(**ASKED | {"tools": [tool]}, tool_choice="required")
    assert caught.value.param == "tools"


def test_anthropics_client_gets_calls(server: Server) -> None:
    tool: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": PARAMETERS}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="smollm2",
            max_tokens=160,
            messages=ASKED["messages"],
            tools=[tool],
            tool_choice={"type": "tool", "name": "get_weather"},
        )
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, PARAMETERS)
