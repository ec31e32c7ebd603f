"""Who and what is let in: keys from a file, other sites' pages, full queues, unknown fields."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from server_kit import HELLO, Answer, Visitor, ask, ask_now, eventually, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.request import BACKGROUND
from octavo.server.process.keys import with_key_file

CHAT = "/v1/chat/completions"


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nalpha\n\n  beta  \n")
    config = with_key_file(ServerConfig(api_keys=("one",), api_key_file=str(path)))
    assert config.api_keys == ("one", "alpha", "beta")
    app = make_house(saying("x"), config).app
    for key, status in (("one", 200), ("beta", 200), ("# ours", 401), ("gamma", 401)):
        assert ask_now(app, CHAT, HELLO, headers={"authorization": f"Bearer {key}"}).status == status
        assert ask_now(app, CHAT, HELLO, headers={"x-api-key": key}).status == status


def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name in ("empty", "absent"):
        with pytest.raises(ConfigError, match=name):
            with_key_file(ServerConfig(api_key_file=str(tmp_path / name)))


def test_an_empty_key_opens_nothing() -> None:
    app = make_house(saying("x"), ServerConfig(api_keys=("",))).app
    for headers in ({}, {"x-api-key": ""}, {"authorization": "Bearer "}):
        assert ask_now(app, CHAT, HELLO, headers=headers).status == 401


def preflight(app: object, origin: str, **asked: str) -> Answer:
    headers = {"origin": origin, "access-control-request-method": "POST", **asked}
    return ask_now(app, CHAT, method="OPTIONS", headers=headers)  # type: ignore[arg-type]


def test_pages_of_other_sites_may_do_nothing_unless_named() -> None:
    assert "access-control-allow-origin" not in preflight(make_house(saying("x")).app, "https://a.example").headers
    app = make_house(saying("x"), ServerConfig(allowed_origins=("https://a.example",), api_keys=("k",))).app
    assert preflight(app, "https://a.example").headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in preflight(app, "https://b.example").headers
    answer = ask_now(app, CHAT, HELLO, headers={"origin": "https://a.example", "authorization": "Bearer k"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = ask_now(app, CHAT, HELLO, headers={"origin": "https://a.example"})
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("origin", "asked", "says"),
    [
        ("https://b.example", {}, "origin: https://b.example is not allowed by --allowed-origins."),
        (
            "https://a.example",
            {"access-control-request-method": "PUT"},
            "access-control-request-method: PUT is not allowed by --allowed-methods.",
        ),
        (
            "null",
            {"access-control-request-headers": "x-other"},
            "origin: null is not allowed by --allowed-origins; access-control-request-headers: x-other is not allowed "
            "by --allowed-headers.",
        ),
        (
            "https://a.example",
            {"access-control-request-private-network": "true"},
            "the server does not support private-network.",
        ),
    ],
)
def test_a_refused_preflight_is_an_error_object(origin: str, asked: dict[str, str], says: str) -> None:
    config = ServerConfig(allowed_origins=("https://a.example",), allowed_methods=("POST",), allowed_headers=("x-a",))
    answer = preflight(make_house(saying("x"), config).app, origin, **asked)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert ("access-control-allow-origin" in answer.headers) == (origin == "https://a.example")
    error = answer.json()["error"]
    assert error["message"] == f"Pages of other sites may not send this request: {says}"
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_back(stream: bool) -> None:
    async def visit() -> None:
        gate = asyncio.Event()
        config = ServerConfig(max_num_queued_reqs=1)
        house = make_house(saying("x"), config, pace=gate.wait, max_num_seqs=2)
        body = HELLO | {"stream": stream}
        first = [Visitor(house.app, CHAT, body) for _ in range(3)]
        await eventually(lambda: len(house.engine.running) == 3)
        assert (await ask(house.app, "/load", method="GET")).json() == {"server_load": 3}
        answer = await ask(house.app, CHAT, body)
        assert answer.status == 429
        assert answer.error()["type"] == "TooManyRequestsError"
        assert "--max-num-queued-reqs is 1" in answer.error()["message"]
        assert int(answer.headers["retry-after"]) >= 1
        metrics = (await ask(house.app, "/metrics", method="GET")).body.decode()
        assert re.search(r'octavo:admission_rejections_total\{[^}]*reason="requests"\} 1.0', metrics)
        gate.set()
        for visitor in first:
            assert (await visitor.whole()).status == 200
        assert (await ask(house.app, CHAT, body)).status == 200
        assert (await ask(house.app, "/load", method="GET")).json() == {"server_load": 0}

    asyncio.run(visit())


def test_waiting_tokens_are_bounded_but_one_request_always_fits() -> None:
    async def visit() -> None:
        gate = asyncio.Event()
        house = make_house(saying("x"), ServerConfig(max_num_queued_tokens=20), pace=gate.wait)
        long = {"prompt": "x" * 50}
        first = Visitor(house.app, "/v1/completions", long)
        await eventually(lambda: len(house.engine.running) == 1)
        refused = await ask(house.app, "/v1/completions", long)
        assert refused.status == 429
        assert "--max-num-queued-tokens is 20" in refused.error()["message"]
        gate.set()
        assert (await first.whole()).status == 200
        assert (await ask(house.app, "/v1/completions", long)).status == 200

    asyncio.run(visit())


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_waits_until_its_first_token_arrives(stream: bool) -> None:
    async def visit() -> None:
        gate, steps = asyncio.Event(), 0

        async def pace() -> None:
            nonlocal steps
            steps += 1
            if steps > 3:
                await gate.wait()

        house = make_house(saying("many words"), ServerConfig(max_num_queued_tokens=20), pace=pace)
        body = {"prompt": "x" * 50, "stream": stream}
        visitors = [Visitor(house.app, "/v1/completions", body)]
        await eventually(lambda: steps > 3)
        visitors.append(Visitor(house.app, "/v1/completions", body))
        await eventually(lambda: len(house.engine.running) == 2 or visitors[1].answer.status == 429)
        gate.set()
        assert [(await one.whole()).status for one in visitors] == [200, 200]

    asyncio.run(visit())


def test_unknown_fields_are_refused_if_asked_to() -> None:
    body = HELLO | {"temprature": 1}
    (warning,) = ask_now(make_house(saying("x")).app, CHAT, body).json()["warnings"]
    assert warning == "The unknown field `temprature` was ignored; did you mean temperature?"
    strict = make_house(saying("x"), ServerConfig(strict_params=True)).app
    refusal = ask_now(strict, CHAT, body).error()
    assert refusal["param"] == "temprature"
    assert "did you mean temperature?" in refusal["message"]
    assert ask_now(strict, "/v1/completions", {"prompt": "a", "foo": None}).error()["param"] == "foo"
    openai = {"safety_identifier": "a", "prompt_cache_key": "b", "prompt_cache_retention": "24h", "user": "c"}
    assert "warnings" not in ask_now(strict, CHAT, HELLO | openai).json()
    assert get_now(strict, "/load").status == 200


def test_a_priority_that_nobody_asks_for_says_so() -> None:
    body = HELLO | {"priority": 3}
    (warning,) = ask_now(make_house(saying("x"), scheduling_policy="fcfs").app, CHAT, body).json()["warnings"]
    assert warning.startswith("`priority` has no effect: the server runs with --scheduling-policy fcfs.")
    strict = make_house(saying("x"), ServerConfig(strict_params=True), scheduling_policy="longest-first").app
    assert ask_now(strict, CHAT, body).error()["param"] == "priority"
    assert ask_now(strict, CHAT, HELLO | {"priority": 0}).status == 200
    house = make_house(saying("x"), ServerConfig(strict_params=True), scheduling_policy="priority")
    assert "warnings" not in ask_now(house.app, CHAT, body).json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", HELLO | {"model": "toy", "max_tokens": 5}),
        ("/v1/responses", {"input": "x"}),
        ("/inference/v1/generate", {"token_ids": [5]}),
    ],
)
def test_clients_have_no_background_priority(path: str, body: dict[str, Any]) -> None:
    house = make_house(saying("x"), scheduling_policy="priority")
    answer = ask_now(house.app, path, body | {"priority": BACKGROUND})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "priority")
    assert answer.json()["error"]["message"].startswith(f"priority must be less than {BACKGROUND}")
    assert ask_now(house.app, path, body | {"priority": BACKGROUND - 1}).status == 200
    refusal = ask_now(house.app, CHAT, HELLO, headers={"X-Vllm-Priority": str(BACKGROUND)}).error()
    assert (refusal["code"], refusal["param"]) == (400, "X-Vllm-Priority")
    assert len(house.engine.requests) == 1


def test_a_header_may_say_the_priority() -> None:
    house = make_house(saying("x"), scheduling_policy="priority")
    for header, field, expected in (("-7", None, -7), ("5", 2, 2), ("", None, 0)):
        body = HELLO | {"priority": field}
        assert ask_now(house.app, CHAT, body, headers={"X-Vllm-Priority": header}).status == 200
        assert house.engine.requests[-1].priority == expected
    refusal = ask_now(house.app, CHAT, HELLO, headers={"X-Vllm-Priority": "high"}).error()
    assert refusal["message"].startswith("The header X-Vllm-Priority must be a whole number, got 'high'.")
    assert refusal["param"] == "X-Vllm-Priority"
