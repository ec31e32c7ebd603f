"""`GET /debug/requests/{id}`, `GET /debug/timeline` and `octavo why`, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from server_kit import (
    HELLO,
    TOKENIZER,
    House,
    Visitor,
    ask,
    ask_now,
    eventually,
    get_now,
    make_frontend,
    make_house,
    saying,
)

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError, EngineDeadError, InvalidRequestError, OctavoError, UnsupportedError
from octavo.core.output import CompletionOutput
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER
from octavo.core.stats import EngineStats
from octavo.engine.fake import FakeEngine, fake_info
from octavo.features.timeline import command, http
from octavo.features.timeline.story import NAME, Decision, Found, Miss, Preemption, Story, Told
from octavo.features.timeline.text import TEXT
from octavo.features.timeline.words import Seen, decision_line, lines, summary
from octavo.server.app import create_app
from octavo.server.siblings.link import listening
from octavo.server.siblings.siblings import SiblingProcesses
from octavo.text.hooks import TextContext

CHAT = "/v1/chat/completions"
NOW = 10_000.0
"""Of the scripted engine's clock."""


def told(*stories: Story, decisions: tuple[Decision, ...] = ()) -> Any:
    return msgspec.to_builtins(Told(NOW, list(stories), list(decisions)))


def story(request_id: str, **fields: Any) -> Story:
    arrival = NOW - 5
    usual = {"index": 0, "num_prompt": 23, "max_tokens": 9, "priority": 0, "arrival": arrival, "queued": arrival + 1}
    return Story(**{"id": request_id, **usual, **fields})


def house_with(*stories: Story, **options: Any) -> House:
    house = make_house(saying("hello"), features=[NAME], **options)
    house.engine.answers[NAME, "find"] = lambda args: told(*(one for one in stories if one.id == args["id"]))
    house.engine.answers[NAME, "list"] = lambda args: told(
        *stories, decisions=tuple(Decision(NOW, "evicted", blocks=n + 1) for n in range(args["decisions"]))
    )
    return house


def test_both_views_of_a_request_are_told_together() -> None:
    house = house_with()
    name = ask_now(house.app, CHAT, HELLO).json()["id"]
    (ended,) = house.app.state.metrics.requests.recent
    engine = story(ended.id, arrival=ended.arrival, queued=ended.begun, admitted=ended.begun, first_token=ended.begun)
    engine.ended, engine.finish, engine.generated = ended.ended, "stop", 6
    house.engine.answers[NAME, "find"] = lambda args: told(engine)
    answer = get_now(house.app, f"/debug/requests/{name}")
    assert answer.status == 200
    body = answer.json()
    assert body["id"] == name
    assert [one["id"] for one in body["engine"]] == [ended.id]
    assert body["server"][0]["reasons"] == ["stop"]
    text = "\n".join(body["text"])
    assert text.startswith(f"request {ended.id}: 23 prompt tokens\n")
    for line in ("arrived", "tokenized and sent", "queued in the engine", "first output ready for the client, "):
        assert line in text
    assert "ended in the server (stop), 6 tokens, 0.0 ms after the engine" in text
    assert "Hello" not in answer.body.decode()
    assert "hello" not in answer.body.decode()


def test_a_request_of_which_only_one_side_knows() -> None:
    house = house_with(story("lonely", waiting_for="kv_blocks"))
    name = ask_now(house.app, CHAT, HELLO).json()["id"]
    assert "ended in the server" in get_now(house.app, f"/debug/requests/{name}").body.decode()
    text = get_now(house.app, "/debug/requests/lonely").json()["text"]
    assert text[-1].endswith("now waiting for KV blocks; 4.00 s so far")
    error = get_now(house.app, "/debug/requests/a/b c").error()
    assert error["code"] == 404
    assert "Request a/b c is not known" in error["message"]


def test_the_text_offset_of_a_miss_is_told_while_the_request_runs() -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(1)
        house = make_house(saying("hello"), features=[NAME], pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, CHAT, HELLO)
        await eventually(lambda: steps.locked() and bool(house.engine.running))
        (name,) = house.engine.running
        miss = Miss("diverged", 9, 14)
        house.engine.answers[NAME, "find"] = lambda args: told(story(name, admitted=1.0, misses=[miss]))
        body = (await ask(house.app, f"/debug/requests/{name}", method="GET")).json()
        assert "not cached: 9 tokens, at token 14 (character 14 of its text): the closest" in "\n".join(body["text"])
        assert body["server"][0]["ended"] == 0.0
        visitor.leaves.set()
        await visitor.whole()
        assert "ended in the server (abort), 1 tokens: its client left" in str(
            (await ask(house.app, f"/debug/requests/{name}", method="GET")).json()["text"]
        )

    asyncio.run(scenario())


def test_lists_are_in_order_and_their_lengths_are_checked() -> None:
    now = NOW
    done = [
        story(f"done-{n}", arrival=now - 9 - n, ended=now - 1, finish="length", first_token=now - 5) for n in (1, 3, 2)
    ]
    waiting = [story(f"waiting-{n}", arrival=now - n, waiting_for="seats") for n in (1, 3, 2)]
    house = house_with(*done, *waiting)
    house.engine.current = EngineStats(
        num_waiting=3, waits_for="seats", num_blocks=10, num_blocks_used=5, num_preemptions=1
    )
    body = get_now(house.app, "/debug/timeline?slowest=2&unfinished=2&decisions=3").json()
    assert [one["id"] for one in body["slowest"]] == ["done-3", "done-2"]
    assert [one["id"] for one in body["unfinished"]] == ["waiting-3", "waiting-2"]
    assert [one["blocks"] for one in body["decisions"]] == [1, 2, 3]
    text = "\n".join(body["text"])
    assert "3 waiting, the first lacks a seat (--max-num-seqs); 50% of the KV cache in use; 1 preemption so far" in text
    assert "waiting-3: 3.00 s; waited" in text
    assert "evicted: 3 blocks of the prefix cache" in text
    for value in ("-1", "x", "1001", "", "9" * 5000):
        assert get_now(house.app, f"/debug/timeline?slowest={value}").error()["param"] == "slowest"


def test_an_engine_that_does_not_answer_is_told_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_ANSWER_S", 0.01)

    async def scenario() -> None:
        steps = asyncio.Semaphore(1)
        house = make_house(saying("hello"), features=[NAME], pace=steps.acquire)  # type: ignore[arg-type]

        async def never(*args: Any) -> Any:
            await asyncio.Event().wait()

        house.engine.call = never  # type: ignore[method-assign]
        visitor = Visitor(house.app, CHAT, HELLO)
        await eventually(lambda: steps.locked() and bool(house.engine.running))
        (name,) = house.engine.running
        body = (await ask(house.app, "/debug/timeline", method="GET")).json()
        assert "the engine has not answered within 0.01 s" in body["text"][1]
        assert f"{name}: " in body["text"][2]
        assert "1 token received" in body["text"][2]
        unknown = await ask(house.app, "/debug/requests/nobody", method="GET")
        assert unknown.status == 503
        assert "has not answered" in unknown.error()["message"]
        visitor.leaves.set()
        await visitor.whole()

        async def dead(*args: Any) -> Any:
            raise EngineDeadError("it was killed")

        house.engine.call = dead  # type: ignore[method-assign]
        body = (await ask(house.app, "/debug/timeline", method="GET")).json()
        assert "the engine is dead: it was killed" in body["text"]

    asyncio.run(scenario())


def test_without_timelines_the_server_tells_what_it_saw_itself() -> None:
    house = make_house(saying("hello"))
    answer = ask_now(house.app, CHAT, HELLO | {"return_cache_misses": True}).json()
    assert "--request-history 0" in str(answer["warnings"])
    assert "ended in the server" in get_now(house.app, f"/debug/requests/{answer['id']}").body.decode()
    for path in ("/debug/timeline", "/debug/requests/other"):
        error = get_now(house.app, path).error()
        assert (error["code"], "--request-history 0" in error["message"]) == (404, True)


def test_timelines_need_a_key_if_the_server_has_keys() -> None:
    house = house_with(config=ServerConfig(api_keys=("k",)))
    for path in ("/debug/timeline", "/debug/requests/a"):
        assert get_now(house.app, path).status == 401


def test_any_process_finds_what_another_one_saw(tmp_path: Path) -> None:
    async def scenario() -> None:
        apps = []
        for number in range(2):
            info = fake_info(name="toy", vocab_size=259, features=[NAME])
            engine = FakeEngine(saying("hello"), info=info)
            engine.answers[NAME, "find"] = lambda args: told()
            apps.append(create_app(make_frontend(engine), siblings=SiblingProcesses(number, 2, tmp_path)))
        paths = [app.state.private for app in apps]
        async with listening(paths[0], tmp_path / "api-0.sock"), listening(paths[1], tmp_path / "api-1.sock"):
            name = (await ask(apps[0], CHAT, HELLO | {"request_id": "a&b c/d é"})).json()["id"]
            for app in apps:
                answer = await ask(app, f"/debug/requests/{name}", method="GET")
                assert answer.status == 200, answer.body
                assert "ended in the server (stop), 6 tokens" in str(answer.json()["text"])
            assert (await ask(apps[1], "/debug/requests/nobody", method="GET")).status == 404

    asyncio.run(scenario())


@pytest.mark.parametrize("asked", ["yes", 1, []])
def test_a_wrong_wish_for_misses_is_refused(asked: Any) -> None:
    error = ask_now(house_with().app, CHAT, HELLO | {"return_cache_misses": asked}).error()
    assert (error["code"], error["param"]) == (400, "return_cache_misses")


def test_the_text_half_adds_misses_and_the_text_offset_of_the_first() -> None:
    hook = TEXT(TextContext(TOKENIZER, fake_info(features=[NAME])))
    before = TOKENIZER.encode("émile", add_special_tokens=False)
    found = Found([Miss("evicted", 4, len(before), 2.5), Miss("new", 13, 10)], before)
    output = CompletionOutput(0, extra={"other": 1})
    hook.answer(output, msgspec.msgpack.encode(found))
    assert output.extra == {
        "other": 1,
        "cache_misses": [
            {"reason": "evicted", "tokens": 4, "position": 6, "evicted_seconds_ago": 2.5, "text_offset": 5},
            {"reason": "new", "tokens": 13, "position": 10},
        ],
    }
    for before in ([], [PLACEHOLDER, 5]):
        hook.answer(output, msgspec.msgpack.encode(Found([Miss("new", 13, 0)], before)))
        assert output.extra["cache_misses"] == [{"reason": "new", "tokens": 13, "position": 0}]
    params = SamplingParams(feature_args={NAME: True})
    assert bytes(hook.option(params, None, [1]) or b"") == msgspec.msgpack.encode(True)
    assert hook.option(SamplingParams(), None, [1]) is None
    with pytest.raises(InvalidRequestError, match="must be true, or left out"):
        hook.option(SamplingParams(feature_args={NAME: "yes"}), None, [1])
    with pytest.raises(UnsupportedError, match="--request-history 0"):
        TEXT(TextContext(TOKENIZER, fake_info())).option(params, None, [1])


ANSWERS = [
    (CHAT, HELLO, lambda events: events[-1]),
    ("/v1/completions", {"prompt": "Hello"}, lambda events: events[-1]),
    ("/inference/v1/generate", {"token_ids": [70, 71], "sampling_params": {}}, lambda events: events[-1]),
    ("/v1/messages", {"max_tokens": 5, **HELLO}, lambda events: events[-2]),
    ("/v1/responses", {"input": "Hello"}, lambda events: events[-1]["response"]),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "last"), ANSWERS)
def test_every_answer_has_them_if_they_are_asked_for(path: str, body: Any, last: Any, stream: bool) -> None:
    house = make_house(saying("hello"), features=[NAME])
    data = msgspec.msgpack.encode(Found([Miss("new", 23, 0)], []))
    house.engine._found = lambda request: {NAME: data} if NAME in request.options else {}
    for asked in (True, False):
        answer = ask_now(house.app, path, body | {"stream": stream, "return_cache_misses": asked})
        lines = answer.body.decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")] if stream else []
        told = last(events) if stream else answer.json()
        assert told.get("cache_misses") == ([{"reason": "new", "tokens": 23, "position": 0}] if asked else None)


def test_misses_are_for_one_prompt() -> None:
    house = make_house(saying("hello"), features=[NAME])
    error = ask_now(house.app, "/v1/completions", {"prompt": ["a", "b"], "return_cache_misses": True}).error()
    assert (error["code"], error["param"]) == (400, "return_cache_misses")
    several = {"messages": [HELLO["messages"], HELLO["messages"]], "return_cache_misses": True}
    answer = ask_now(house.app, f"{CHAT}/batch", several).json()
    assert "send a request for each conversation" in str(answer["warnings"])
    assert "cache_misses" not in answer


def test_the_command_prints_what_the_server_says(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked: list[tuple[str, dict[str, str]]] = []
    replies = [
        httpx.Response(200, json={"text": ["one", "two"], "n": 1}),
        httpx.Response(200, json={"text": ["one"], "n": 1}),
        httpx.Response(404, json={"error": {"message": "There is no such request."}}),
        httpx.Response(200, json=[1]),
        httpx.Response(502, text="<html>"),
    ]

    def get(url: str, **options: Any) -> httpx.Response:
        asked.append((url, options["headers"]))
        return replies[len(asked) - 1]

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert command.run(["a/b?é", "--url", "http://h:1/v1/", "--api-key", "k"]) == 0
    assert asked[-1] == ("http://h:1/debug/requests/a%2Fb%3F%C3%A9", {"Authorization": "Bearer k"})
    assert capsys.readouterr().out == "one\ntwo\n"
    assert command.run(["--slowest", "3", "--model", "a/b", "--json"]) == 0
    assert asked[-1] == ("http://127.0.0.1:8000/debug/timeline?slowest=3&model=a%2Fb", {})
    assert json.loads(capsys.readouterr().out)["n"] == 1
    with pytest.raises(OctavoError, match="no such request"):
        command.run(["x"])
    with pytest.raises(OctavoError, match="status 200, and nothing that Octavo says"):
        command.run(["x"])
    with pytest.raises(ConfigError, match="no Octavo server answers at"):
        command.run(["x"])
    with pytest.raises(ConfigError, match="--slowest is for a list"):
        command.run(["x", "--slowest", "3"])


def test_a_whole_story_in_words() -> None:
    one = Story(
        id="r",
        index=0,
        num_prompt=1234,
        max_tokens=64,
        priority=2,
        arrival=100.0,
        queued=100.01,
        waits={"kv_blocks": 1.1, "step": 0.1, "lora: adapter sql": 0.0001},
        admitted=101.21,
        cached=512,
        loaded={"host_cache": 256},
        misses=[Miss("evicted", 320, 512, 7.0), Miss("new", 402, 832)],
        chunks=3,
        prompt_planned=101.3,
        first_token=101.35,
        generated=61,
        num_preemptions=18,
        preemptions=[Preemption(101.5, "priority", "vip", 1240, 101.9, 48)],
        decode_s=1.2,
        decode_steps=40,
        decode_rows=2440,
        decode_prompt_tokens=400,
        drafted=40,
        accepted=20,
        ended=103.0,
        finish="stop",
    )
    seen = Seen(
        id="r",
        arrival=100.0,
        begun=100.005,
        first_output=101.352,
        last_output=102.9,
        ended=103.002,
        prompt_tokens=1234,
        generated=61,
        reasons=["stop"],
    )
    assert lines([one], seen, 200.0, 2000) == [
        "request r: 1,234 prompt tokens",
        "      +0.000 s  arrived",
        "      +0.005 s  tokenized and sent to the engine",
        "      +0.010 s  queued in the engine with priority 2",
        "      +1.210 s  admitted after 1.20 s (1.10 s for KV blocks, 100.0 ms for the step under way); 512 of 1,234 "
        "prompt tokens from the prefix cache, 256 of them loaded by host_cache",
        "      +1.210 s  not cached: 320 tokens, at token 512 (character 2,000 of its text): it was cached, and its "
        "blocks were evicted for other requests, 7.00 s before",
        "      +1.210 s  not cached: 402 tokens, at token 832: nothing cached goes on like it",
        "      +1.300 s  the rest of the prompt planned, in 3 steps",
        "      +1.350 s  first token in the engine",
        "      +1.352 s  first output ready for the client, 2.0 ms after the engine's first token",
        "      +1.500 s  preempted for request vip, as it is more urgent; 1,240 tokens computed until then",
        "      +1.500 s  and preempted 17 more times",
        "      +1.900 s  admitted again after 400.0 ms; 48 tokens to be computed again",
        "      +3.000 s  ended in the engine: stop, 61 tokens",
        "      +3.000 s  decoded 60 further tokens, 30.0 ms for each of its steps; the engine's steps then had 61.0 "
        "rows and 10 prompt tokens of others in the mean",
        "      +3.000 s  20 of 40 drafted tokens accepted (50%)",
        "      +3.002 s  ended in the server (stop), 61 tokens, 2.0 ms after the engine",
    ]
    assert summary(one, 200.0) == (
        "r: 3.00 s; waited 1.20 s; 512 of 1,234 prompt tokens cached, first token after 1.35 s, 61 generated, "
        "preempted 18 times; ended (stop)"
    )
    preempted = Decision(99.5, "preempted", "r", 1, "kv_blocks", 12, by="s")
    assert decision_line(preempted, 100.0) == "    -0.500 s  preempted r/1: kv_blocks, for s, 12 tokens computed"
