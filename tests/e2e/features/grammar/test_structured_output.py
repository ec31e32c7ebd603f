"""Structured output of the real model behind the real processes, asked by the openai client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from serving import Server, together

pytestmark = pytest.mark.e2e

ASKED: Any = [{"role": "user", "content": "Invent a person and answer as JSON."}]

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", 3, None]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "format": "date"}]},
    {
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}}, "required": ["id"]},
    {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 1, "maxProperties": 2},
]
REGEXES = [r"[a-z]{3,6}@[a-z]{3,8}\.(com|org)", r"\d{4}-(0[1-9]|1[0-2])", r"(yes|no), (sir|madam)\.", r"#[0-9a-f]{6}"]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


def test_parse_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=ASKED, response_format=Person, temperature=1, seed=3, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.slow
def test_many_schemas_at_once_are_all_kept(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str | None, dict[str, Any]]:
        schema = SCHEMAS[number % len(SCHEMAS)]
        answer = await client.chat.completions.create(
            model="smollm2",
            messages=ASKED,
            temperature=1,
            seed=number,
            max_tokens=96,
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
        )
        return answer.choices[0].finish_reason, answer.choices[0].message.content, schema

    async def all_of_them() -> list[tuple[str, str | None, dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    results = asyncio.run(all_of_them())
    kept = 0
    for finish, content, schema in results:
        assert content is not None
        if finish == "stop":
            checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
            checker.validate(json.loads(content))
            kept += 1
        else:
            assert finish == "length"
    assert kept > 16


def test_regular_expressions_and_choices(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "prompt": "So:", "max_tokens": 60, "temperature": 1, "seed": 1}
    texts: list[Any] = together(
        lambda regex: client.completions.create(**asked, extra_body={"guided_regex": regex}), REGEXES
    )
    for regex, text in zip(REGEXES, texts, strict=True):
        assert text.choices[0].finish_reason == "stop"
        assert re.fullmatch(regex, text.choices[0].text)
    choice = client.chat.completions.create(
        model="smollm2",
        messages=ASKED,
        temperature=1,
        extra_body={"structured_outputs": {"choice": ["alpha", "beta"]}},
    )
    assert choice.choices[0].message.content in ("alpha", "beta")


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "smollm2",
        "messages": ASKED,
        "temperature": 0.8,
        "seed": 11,
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMAS[5]}},
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_schema_is_a_400_with_the_reason(client: openai.OpenAI, server: Server, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="strin") as caught:
        client.chat.completions.create(
            model="smollm2",
            messages=ASKED,
            stream=stream,
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
        )
    assert caught.value.param == "response_format"
    server.wait_idle()
