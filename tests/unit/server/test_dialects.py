"""One server, two dialects: who speaks Anthropic's gets its models, its errors and its header."""

from __future__ import annotations

import asyncio

import pytest
from server_kit import HELLO, House, ask, ask_now, get_now, make_house, saying

from octavo.config import ServerConfig

ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture
def house() -> House:
    return make_house(saying("x"), ServerConfig(served_model_name=("toy", "team/other")))


def test_models_in_the_dialect_of_the_client(house: House) -> None:
    listed = get_now(house.app, "/v1/models", headers=ANTHROPIC).json()
    assert [(one["type"], one["id"], one["display_name"]) for one in listed["data"]] == [
        ("model", "toy", "toy"),
        ("model", "team/other", "team/other"),
    ]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "toy", "team/other")
    assert listed["data"][0]["created_at"].endswith("Z")
    assert get_now(house.app, "/v1/models/team/other", headers=ANTHROPIC).json()["id"] == "team/other"
    assert get_now(house.app, "/v1/models").json()["object"] == "list"
    missing = get_now(house.app, "/v1/models/nobody", headers=ANTHROPIC)
    assert (missing.status, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_the_id_of_a_request_in_the_header_that_the_client_reads(house: House) -> None:
    answer = ask_now(house.app, "/v1/messages", HELLO | {"max_tokens": 4}, headers={"x-request-id": "abc"})
    assert (answer.headers["request-id"], answer.headers["x-request-id"]) == ("abc", "abc")
    assert "request-id" not in get_now(house.app, "/v1/models").headers


def test_errors_at_the_door_and_before_the_first_event() -> None:
    house = make_house(saying("x"), ServerConfig(api_keys=("key",), max_num_queued_reqs=0), max_num_seqs=1)
    refused = ask_now(house.app, "/v1/messages", HELLO | {"max_tokens": 4})
    assert (refused.status, refused.json()["type"]) == (401, "error")
    assert refused.json()["error"]["type"] == "authentication_error"

    async def two_at_once() -> None:
        gate = asyncio.Event()
        busy = make_house(saying("x"), ServerConfig(max_num_queued_reqs=0), pace=gate.wait, max_num_seqs=1)
        body = HELLO | {"max_tokens": 4, "stream": True}
        first = asyncio.ensure_future(ask(busy.app, "/v1/messages", body))
        await asyncio.sleep(0)
        while not busy.engine.requests:
            await asyncio.sleep(0)
        second = await ask(busy.app, "/v1/messages", body)
        gate.set()
        assert (await first).status == 200
        assert (second.status, second.json()["error"]["type"]) == (429, "rate_limit_error")

    asyncio.run(two_at_once())


@pytest.mark.parametrize(
    "path", ["/health", "/live", "/ready", "/ping", "/", "/version", "/metrics", "/docs", "/openapi.json", "/v1/models"]
)
def test_what_answers_get_answers_head_without_a_body(house: House, path: str) -> None:
    answer, whole = (ask_now(house.app, path, method=method) for method in ("HEAD", "GET"))
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"] == whole.headers["content-type"]
    assert "content-length" in answer.headers


def test_a_slash_at_the_end_changes_nothing(house: House) -> None:
    assert ask_now(house.app, "/v1/chat/completions/", HELLO).status == 200
    for path in ("/v1/models", "/health"):
        plain, slashed = (ask_now(house.app, path + end, method="GET") for end in ("", "/"))
        assert (slashed.status, slashed.body) == (200, plain.body)
    below = make_house(saying("x"), ServerConfig(root_path="/api"))
    assert all(ask_now(below.app, path, method="GET").status == 200 for path in ("/api/", "/api/v1/models/", "/"))
    assert ask_now(house.app, "/nothing/", method="GET").status == 404


def test_the_head_of_what_is_not_there(house: House) -> None:
    assert ask_now(house.app, "/nothing", method="HEAD").status == 404
    assert ask_now(house.app, "/v1/completions", method="HEAD").status == 405
