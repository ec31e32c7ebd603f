"""The many fields that ask for a form of output all say the same to the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from server_kit import HELLO, ask, ask_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.output import BAD_LOGITS, FinishReason, TokenDelta
from octavo.core.structured import UNFOLLOWED, StructuredOutputsParams
from octavo.server.openai.feature_fields import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PART = {"name": "x", "schema": "{}", "where": "the function 'f'"}
PATHS = {"/v1/chat/completions": HELLO, "/v1/completions": {"prompt": "Hello"}}


def asked(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What reached the engine of `fields`."""
    house = make_house(saying("x"), features=["grammar"])
    answer = ask_now(house.app, path, PATHS[path] | fields)
    assert answer.status == 200, answer.body
    (request,) = house.engine.requests
    assert request.params.structured_outputs is None
    if "grammar" not in request.options:
        return {}
    form = msgspec.msgpack.decode(request.options["grammar"], type=StructuredOutputsParams)
    return msgspec.to_builtins(form)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": None, "guided_json": None}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "grammar", "grammar": "start: A"}}, {"grammar": "start: A"}),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structural_tag": {"format": {"type": "any_text"}}},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": "{}"}}, {"json": "{}"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"frame": "start: @x", "parts": [PART]}}, {"frame": "start: @x", "parts": (PART,)}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": "{}", "guided_whitespace_pattern": " ?"}, {"json": "{}", "whitespace_pattern": " ?"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_json_object": False}, {}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": "root ::= A"}, {"grammar": "root ::= A"}),
        ({"json_schema": "{}"}, {"json": "{}"}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"grammar": "root ::= A"}, {"grammar": "root ::= A"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ],
)
def test_a_spelling_is_understood(path: str, fields: dict[str, Any], form: dict[str, Any]) -> None:
    got = asked(path, fields)
    got.pop("param", None)
    assert got == form


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"frame": "", "parts": [{"name": "x"}]}}, "structured_outputs.parts.0.schema"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "regex": "b"}, "regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a" * 1001}, "guided_regex"),
        ({"guided_json": {"type": "integer", "maximum": 10**300}}, "guided_json"),
    ],
)
def test_a_contradiction_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    house = make_house(saying("x"), ServerConfig(max_schema_bytes=1000), features=["grammar"])
    answer = ask_now(house.app, path, PATHS[path] | fields)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert not house.engine.requests


def test_an_engine_without_the_feature_says_so() -> None:
    house = make_house(saying("x"))
    error = ask_now(house.app, "/v1/chat/completions", HELLO | {"guided_regex": "a"}).error()
    assert error["param"] == "guided_regex"
    assert "no structured output" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_by_the_engine_is_a_400_with_its_reason(path: str, stream: bool) -> None:
    house = make_house(saying("x"), features=["grammar"])

    async def refused(request: Any) -> Any:
        for index in range(request.params.n):
            yield TokenDelta(
                request.id, index, [], finish=FinishReason.ERROR, error="The schema is odd.", refused="guided_json"
            )

    house.engine.generate = refused  # type: ignore[method-assign]
    body = PATHS[path] | {"guided_json": {}, "stream": stream, "n": 2, "temperature": 1}
    answer = asyncio.run(ask(house.app, path, body))
    assert answer.status == 400
    error = answer.error()
    assert error["message"].startswith("The schema is odd.")
    assert error["param"] == "guided_json"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "fields", "status", "param"),
    [
        (UNFOLLOWED + "too complex", {"guided_regex": "a"}, 400, "guided_regex"),
        (BAD_LOGITS, {"allowed_token_ids": [5], "bad_words": ["a"]}, 400, "allowed_token_ids"),
        (BAD_LOGITS, {"guided_regex": "a", "min_tokens": 2}, 400, "min_tokens"),
        (BAD_LOGITS, {}, 500, None),
        ("Internal error: KeyError: 'secret'", {"guided_regex": "a"}, 500, None),
    ],
)
def test_what_ends_by_what_it_asked_for_is_no_fault_of_the_server(
    error: str, fields: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    """For clients send again what got a 500."""
    house = make_house(saying("x"), features=["grammar"])

    async def failing(request: Any) -> Any:
        yield TokenDelta(request.id, 0, [7])
        yield TokenDelta(request.id, 0, [], finish=FinishReason.ERROR, error=error)

    house.engine.generate = failing  # type: ignore[method-assign]
    answer = asyncio.run(ask(house.app, "/v1/chat/completions", HELLO | fields | {"stream": stream}))
    assert answer.status == (200 if stream else status)
    told = answer.events()[-1] if stream else answer.json()
    assert (told["error"]["code"], told["error"]["param"]) == (status, param)
    assert "secret" not in answer.body.decode()


def test_bodies_have_every_field_of_the_parameter() -> None:
    fields = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    assert fields | {"param"} == set(StructuredOutputsParams.__struct_fields__)
