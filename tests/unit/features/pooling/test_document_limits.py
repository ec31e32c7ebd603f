"""The OpenAPI document says what the door lets through: its limits are taken, and what lies beyond them is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pooler_kit import told
from server_kit import HELLO, VOCAB_SIZE, ask, make_house, saying

from octavo.config import ServerConfig
from octavo.features.pooling.params import PoolerInfo
from octavo.text.hooks import TextHook

POOLER = PoolerInfo(pooling="mean", normalize=True, size=8, matryoshka=[4])
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO | {"max_tokens": 2},
    "/v1/completions": {"prompt": [5], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": HELLO | {"max_tokens": 2},
    "/v1/messages/count_tokens": HELLO,
    "/detokenize": {"tokens": [5]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
}
TOGETHER = (
    "maximum context length",
    "less than or equal to max_tokens",
    "needs logprobs",
    "needs tools",
    "needs use_beam_search",
    "when using `logprob_token_ids`",
)
"""What may still be wrong with a value that is within its limits: it does not go with the other fields."""

LENIENT = {
    ("tool_choice", "/v1/responses"),
    ("tool_choice", "/v1/messages"),
    ("tool_choice", "/v1/messages/count_tokens"),
}
"""Without tools nobody looks at the choice."""


@cache
def app() -> Any:
    config = ServerConfig(max_n=3, max_stop_strings=2, max_prompts=4, max_inputs=5)
    features = ["grammar", "thinking", "pooling"]
    tasks = ["generate", "embed", "token_embed"]
    return make_house(
        saying("x"), config, features=features, tasks=tasks, feature_info=told(POOLER), max_logprobs=6
    ).app


@cache
def document() -> Any:
    return app().openapi()


def beyond(schema: dict[str, Any]) -> Iterator[Any]:
    """Values that a schema of one type excludes by its limits."""
    if "enum" in schema:
        yield "nonsense" if schema.get("type") == "string" else max(schema["enum"]) + 1
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if schema.get("minLength") == 1:
        yield ""
    if "pattern" in schema:
        yield next(text for text in ("?!", "a\nb") if not re.search(schema["pattern"], text))
    if schema.get("minItems") == 1:
        yield []
    for value in beyond(schema["items"]) if isinstance(schema.get("items"), dict) else ():
        yield [value]
    if "maxItems" in schema and (inside := next(within(schema.get("items", {})), None)) is not None:
        yield [inside] * (schema["maxItems"] + 1)
    if schema.get("type") == "object" and "type" in schema.get("properties", {}):
        yield {"type": "nonsense"}
        yield {}


def within(schema: dict[str, Any]) -> Iterator[Any]:
    if "enum" in schema:
        yield from schema["enum"]
    for name in ("minimum", "maximum"):
        if name in schema and "enum" not in schema:
            yield schema[name]
    if schema.get("type") == "string" and "enum" not in schema and "pattern" not in schema:
        yield "a"
    for value in within(schema["items"]) if "items" in schema else ():
        yield [value]
        yield [value] * min(schema.get("maxItems", 1), 8)


def branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null" and "$ref" not in one]


def properties(path: str) -> dict[str, list[dict[str, Any]]]:
    """Field -> what each of its types is narrowed to."""
    body = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document()["components"]["schemas"][body.rpartition("/")[2]]
    return {name: branches(one) for name, one in schema["properties"].items()}


def nested(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, body) where the value lies beyond the limits of an object within the body."""
    if path != "/v1/chat/completions":
        return
    rule = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
    for name, low, high in (("max_pattern_size", 0, 1025), ("min_pattern_size", 0, 1025), ("min_count", 1, 1)):
        for value in (low, high):
            yield name, {"repetition_detection": rule | {name: value}}
    tool = {"type": "function", "function": {"name": "f"}}
    yield "type", {"tools": [tool | {"type": "nonsense"}]}
    yield "name", {"tools": [tool | {"function": {"name": "?!"}}]}
    yield "type", {"response_format": {"type": "nonsense"}}
    yield "content", {"messages": [{"role": "user", "content": [{"type": "nonsense", "text": "a"}]}]}


@pytest.mark.features("grammar")
@pytest.mark.parametrize("path", BASES)
def test_what_lies_beyond_is_refused(path: str) -> None:
    tried = 0

    async def scenario() -> None:
        nonlocal tried
        cases = [
            (name, {name: value}) for name, ways in properties(path).items() for way in ways for value in beyond(way)
        ]
        for name, fields in [*cases, *nested(path)]:
            others = [value for way in properties(path).get(name, ()) for value in within(way)]
            if fields.get(name) in others or (name, path) in LENIENT:  # beyond one of its types, within another
                continue
            answer = await ask(app(), path, BASES[path] | fields)
            assert answer.status in (400, 422), (name, fields, answer.body)
            tried += 1

    asyncio.run(scenario())
    assert tried > (40 if path == "/v1/chat/completions" else 0)


@pytest.mark.features("beams", "grammar", "prompt_embeds", "thinking")
@pytest.mark.parametrize("path", [path for path in BASES if path not in ("/v1/embeddings", "/pooling", "/rerank")])
def test_the_limits_themselves_are_taken(path: str) -> None:
    tried = 0

    async def scenario() -> None:
        nonlocal tried
        for name, ways in properties(path).items():
            for value in (value for way in ways for value in within(way) if abs(_size(value)) < 1 << 62):
                if name in ("model", "previous_response_id", "chat_template", "suffix", "instructions"):
                    continue
                answer = await ask(app(), path, BASES[path] | {name: value})
                text = answer.body.decode()
                assert answer.status == 200 or any(one in text for one in TOGETHER), (name, value, text)
                tried += 1

    asyncio.run(scenario())
    assert tried > 0


def _size(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def test_limits_are_those_of_this_server() -> None:
    chat = properties("/v1/chat/completions")
    assert chat["n"][0]["maximum"] == 3
    assert chat["top_logprobs"][0]["maximum"] == 6
    assert chat["stop"][1]["maxItems"] == 2
    assert chat["stop_token_ids"][0]["items"]["maximum"] == VOCAB_SIZE - 1
    assert properties("/v1/completions")["prompt"][1]["maxItems"] == 4
    assert properties("/v1/embeddings")["dimensions"][0]["enum"] == [8, 4]
    other = make_house(saying("x"), max_logprobs=-1).app.openapi()["components"]["schemas"]
    assert other["ChatBody"]["properties"]["n"]["anyOf"][0]["maximum"] == 64, "documents share nothing"
    assert other["ChatBody"]["properties"]["prompt_logprobs"]["anyOf"][0]["minimum"] == -1


def test_token_ids_that_features_add_are_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextHook, "added_tokens", 3)
    schemas = make_house(saying("x")).app.openapi()["components"]["schemas"]
    stops = schemas["CompletionBody"]["properties"]["stop_token_ids"]["anyOf"][0]
    assert stops["items"]["maximum"] == VOCAB_SIZE + 2


def test_streams_are_documented() -> None:
    paths = make_house(saying("x")).app.openapi()["paths"]
    streams = {
        path
        for path, methods in paths.items()
        if "text/event-stream" in methods.get("post", {}).get("responses", {}).get("200", {}).get("content", {})
    }
    assert streams == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/invocations",
    }
