"""Health, readiness, keys, ids, the list of models, the documents."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from server_kit import HELLO, Visitor, ask, ask_now, eventually, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.stats import EngineStats
from octavo.version import __version__

CHAT = "/v1/chat/completions"


def test_a_healthy_server() -> None:
    app = make_house(saying("x")).app
    for path in ("/health", "/live", "/ready", "/ping"):
        assert get_now(app, path).status == 200, path
    assert ask_now(app, "/ping").status == 200
    assert get_now(app, "/version").json() == {"version": __version__}


def test_a_dead_engine_is_told() -> None:
    house = make_house(saying("x"))
    house.engine.die("The engine core was killed by SIGKILL.")
    for path in ("/health", "/live", "/ready", "/ping"):
        answer = get_now(house.app, path)
        assert answer.status == 503, path
        assert answer.error()["message"] == "The engine core was killed by SIGKILL."
    assert get_now(house.app, "/version").status == 200
    assert get_now(house.app, "/v1/models").status == 200
    assert "octavo:engine_healthy" in get_now(house.app, "/metrics").body.decode()


def test_a_draining_server_finishes_what_it_has() -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(0)
        house = make_house(saying("abc"), pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, CHAT, HELLO)
        await eventually(lambda: len(house.engine.running) == 1)
        house.lifecycle.drain()
        assert (await ask(house.app, "/ready", method="GET")).status == 503
        assert (await ask(house.app, "/health", method="GET")).status == 200
        refused = await ask(house.app, CHAT, HELLO)
        assert refused.status == 503
        assert refused.headers["retry-after"]
        assert "shutting down" in refused.error()["message"]
        assert not house.lifecycle.idle.is_set()
        for _ in range(9):
            steps.release()
        assert (await visitor.whole()).json()["choices"][0]["message"]["content"] == "abc"
        assert house.lifecycle.idle.is_set()

    asyncio.run(scenario())


def test_requests_on_their_way_are_listed_and_nobody_reads_them_without_a_key() -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(0)
        house = make_house(saying("abc"), ServerConfig(api_keys=("k",)), pace=steps.acquire)  # type: ignore[arg-type]
        key = {"authorization": "Bearer k"}

        async def listed() -> list[dict[str, Any]]:
            answer = await ask(house.app, "/debug/requests", method="GET", headers=key)
            assert answer.json()["engine"]["healthy"]
            found: list[dict[str, Any]] = answer.json()["requests"]
            return found

        assert await listed() == []
        assert (await ask(house.app, "/debug/requests", method="GET")).status == 401
        visitors = [Visitor(house.app, CHAT, HELLO | {"max_tokens": most}, headers=key) for most in (9, 7)]
        await eventually(lambda: len(house.engine.running) == 2)
        before = await listed()
        assert [one["max_tokens"] for one in before] == [9, 7], "the oldest first"
        assert {(one["state"], one["generated_tokens"], one["since_last_token"]) for one in before} == {
            ("first token", 0, None)
        }
        for _ in range(2):
            steps.release()
        await eventually(lambda: all(house.engine.received(one["id"]).tokens for one in before))
        for one in await listed():
            assert (one["state"], one["generated_tokens"]) == ("generating", 1)
            assert 0 <= one["since_last_token"] <= one["age"]
        for _ in range(20):
            steps.release()
        for visitor in visitors:
            await visitor.whole()
        assert await listed() == []
        assert "Hello" not in str(before), "no prompts"

    asyncio.run(scenario())


@pytest.mark.parametrize("paused", [False, True])
def test_a_pause_is_told_where_requests_that_wait_are_listed(paused: bool) -> None:
    house = make_house(saying("x"))
    house.engine.current = EngineStats(num_waiting=1, paused=paused)
    told = get_now(house.app, "/debug/requests").json()["engine"]
    assert (told["healthy"], told["waiting"], told["paused"]) == (True, 1, paused)


def test_models() -> None:
    app = make_house(saying("x"), ServerConfig(served_model_name=("org/first", "second"))).app
    cards = get_now(app, "/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["org/first", "second"]
    card = get_now(app, "/v1/models/org/first").json()
    assert card == cards["data"][0]
    assert card["object"] == "model"
    assert card["owned_by"] == "octavo"
    assert card["root"] == "toy"
    assert card["max_model_len"] == 1024
    assert get_now(app, "/v1/models/toy").error()["message"].startswith("The model `toy` does not exist.")
    for name, told in (("second", "second"), (None, "org/first")):
        assert ask_now(app, CHAT, HELLO | {"model": name}).json()["model"] == told


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer two"}, 200),
        ({"authorization": "bearer one"}, 200),
        ({"x-api-key": "one"}, 200),
        ({"Authorization": "Bearer three"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "one"}, 401),
        ({"x-api-key": "on"}, 401),
        ({"x-api-key": "one", "Authorization": "Bearer other"}, 200),
        ({"x-api-key": "other", "Authorization": "Bearer one"}, 200),
        ({"x-api-key": "on", "Authorization": "Bearer e"}, 401),
        ({"x-api-key": "ÿ"}, 401),
        ({"Authorization": "Bearer "}, 401),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    app = make_house(saying("x"), ServerConfig(api_keys=("one", "two"))).app
    guarded = [
        ask_now(app, CHAT, HELLO, headers=headers),
        get_now(app, "/v1/models", headers=headers),
        ask_now(app, "/tokenize", {"prompt": "a"}, headers=headers),
    ]
    for answer in guarded:
        assert answer.status == status
        if status == 401:
            assert answer.error()["type"] == "AuthenticationError"
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health", "/metrics", "/openapi.json", "/version"):
        assert get_now(app, path).status == 200


def test_ids() -> None:
    app = make_house(saying("x")).app

    def ask_with(**options: Any) -> tuple[str, str]:
        answer = ask_now(app, CHAT, HELLO | options.pop("body", {}), **options)
        return answer.json()["id"], answer.headers["x-request-id"]

    first, second = ask_with(), ask_with()
    assert first != second
    assert first[0] == f"chatcmpl-{first[1]}"
    assert ask_with(headers={"x-request-id": "mine"}) == ("chatcmpl-mine", "mine")
    assert ask_with(headers={"x-request-id": "mine"}, body={"request_id": "other"}) == ("chatcmpl-mine", "mine")
    assert ask_with(body={"request_id": "other"})[0] == "chatcmpl-other"
    assert ask_with(body={"request_id": "chatcmpl-x"})[0] == "chatcmpl-x"
    for bad in ("x" * 200, "a b", "é", ""):
        assert ask_with(headers={"x-request-id": bad})[1] != bad
    assert ask_now(app, "/v1/completions", {"prompt": "a"}).json()["id"].startswith("cmpl-")
    assert get_now(app, "/nothing", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def test_the_documents() -> None:
    app = make_house(saying("x")).app
    document = get_now(app, "/openapi.json").json()
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/tokenize"} <= paths.keys()
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    chat = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert chat["required"] == ["messages"]
    assert {"temperature", "min_p", "stream_options", "stop"} <= chat["properties"].keys()
    assert b"#/$defs/" not in get_now(app, "/openapi.json").body
    assert get_now(app, "/docs").status == 200
    closed = make_house(saying("x"), ServerConfig(enable_docs=False)).app
    assert get_now(closed, "/openapi.json").status == 404
    assert get_now(closed, "/docs").status == 404


def test_a_model_without_a_template_says_so() -> None:
    app = make_house(saying("x"), chat=False).app
    answer = ask_now(app, CHAT, HELLO)
    assert answer.status == 400
    assert "chat template" in answer.error()["message"]
    assert ask_now(app, "/v1/completions", {"prompt": "a"}).status == 200


def test_the_document_declares_what_stands_in_paths() -> None:
    document = get_now(make_house(saying("x")).app, "/openapi.json").json()
    assert any("{" in path for path in document["paths"])
    for path, methods in document["paths"].items():
        for operation in methods.values():
            declared = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"]
            assert sorted(declared) == sorted(re.findall(r"{(\w+)}", path)), path
