"""The HTTP bench against a made-up server."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from octavo.bench.client import Target
from octavo.bench.load import LoadPattern, first_model, profile, run_load, wait_ready
from octavo.bench.samples import Sample
from octavo.bench.timing import Timing
from octavo.core.errors import ConfigError


class Stream(httpx.AsyncByteStream):
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self.lines:
            yield line.encode() + b"\n\n"


def event(**fields: Any) -> str:
    return "data: " + json.dumps(fields)


def text(piece: str) -> str:
    return event(choices=[{"index": 0, "text": piece}])


def usage(prompt: int, completion: int) -> str:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


def target(endpoint: str = "/v1/completions", **body: Any) -> Target:
    return Target(base_url="http://server", endpoint=endpoint, model="m", body=body, headers={"X-Test": "1"})


def load(
    answer: Callable[[dict[str, Any]], httpx.Response],
    samples: list[Sample],
    pace: LoadPattern | None = None,
    to: Target | None = None,
) -> list[Timing]:
    transport = httpx.MockTransport(lambda request: answer(json.loads(request.content)))
    timings, duration = asyncio.run(run_load(to or target(), samples, pace or LoadPattern(), transport=transport))
    assert duration > 0
    return timings


def streaming(*lines: str) -> httpx.Response:
    return httpx.Response(200, stream=Stream(list(lines)))


def test_tokens_and_times_come_from_the_stream() -> None:
    [timing] = load(
        lambda body: streaming(text("a"), text("b"), text(""), text("c"), usage(11, 4), "data: [DONE]"),
        [Sample([1] * 10, 10, 4)],
    )
    assert timing.ok
    assert (timing.prompt_tokens, timing.output_tokens) == (11, 4)
    assert len(timing.arrivals) == 3
    assert 0 < timing.ttft <= timing.arrivals[1] <= timing.arrivals[2] <= timing.latency
    assert len(timing.gaps) == 2
    assert timing.tpot == pytest.approx((timing.latency - timing.ttft) / 3)


def test_without_usage_the_chunks_are_counted() -> None:
    [timing] = load(lambda body: streaming(text("a"), text("b"), "data: [DONE]"), [Sample("x", 5, 4)])
    assert (timing.prompt_tokens, timing.output_tokens) == (5, 2)


def test_the_request_asks_for_what_the_sample_says() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        bodies.append(body)
        return streaming(text("a"), "data: [DONE]")

    load(answer, [Sample([5, 6], 2, 9)], to=target(temperature=0, ignore_eos=True))
    load(answer, [Sample("hello", 1, 9)], to=target("/v1/chat/completions"))
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    assert bodies[0] == {**common, "prompt": [5, 6], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    assert bodies[1] == {
        **common,
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 9,
    }


def test_chat_deltas_count_but_the_role_does_not() -> None:
    def delta(**fields: Any) -> str:
        return event(choices=[{"index": 0, "delta": fields}])

    [timing] = load(
        lambda body: streaming(delta(role="assistant", content=""), delta(content="a"), delta(), "data: [DONE]"),
        [Sample("x", 1, 2)],
        to=target("/v1/chat/completions"),
    )
    assert timing.output_tokens == 1


def test_one_failure_is_noted_and_the_others_go_on() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        match body["max_tokens"]:
            case 1:
                return httpx.Response(400, json={"error": {"message": "no"}})
            case 2:
                return streaming(text("a"), event(error={"message": "died"}), "data: [DONE]")
            case 3:
                raise httpx.ConnectError("refused")
            case 4:
                return streaming("data: [DONE]")
            case 5:
                return streaming("data: {broken")
        return streaming(text("a"), "data: [DONE]")

    timings = load(answer, [Sample("x", 1, n) for n in range(1, 7)])
    errors = [timing.error or "" for timing in timings]
    assert "HTTP 400" in errors[0]
    assert "died" in errors[1]
    assert "refused" in errors[2]
    assert "without a token" in errors[3]
    assert "JSONDecodeError" in errors[4]
    assert errors[5] == ""


def test_concurrency_is_held_to_its_limit() -> None:
    under_way = most = 0

    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            for _ in range(5):
                await asyncio.sleep(0)
            under_way -= 1
            return streaming(text("a"), "data: [DONE]")

    samples = [Sample("x", 1, 1)] * 10
    asyncio.run(run_load(target(), samples, LoadPattern(max_concurrency=3), transport=Slow()))
    assert most == 3
    most = 0
    asyncio.run(run_load(target(), samples, LoadPattern(), transport=Slow()))
    assert most == 10


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (100.0, 0.1), (0.25, 2.0)])
def test_gaps_have_the_asked_rate_and_burstiness(burstiness: float, spread: float) -> None:
    delays = list(LoadPattern(rate=20, burstiness=burstiness).delays(20_000, random.Random(1)))
    gaps = [b - a for a, b in itertools.pairwise(delays)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert delays[0] == 0
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert deviation / mean == pytest.approx(spread, rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert list(LoadPattern().delays(4, random.Random(0))) == [0, 0, 0, 0]


def test_the_model_is_taken_from_the_server() -> None:
    listing = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": [{"id": "first"}, {"id": "b"}]}))
    empty = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": []}))
    assert asyncio.run(first_model("http://server", {}, listing)) == "first"
    with pytest.raises(ConfigError, match="give --model"):
        asyncio.run(first_model("http://server", {}, empty))
    locked = httpx.MockTransport(lambda request: httpx.Response(401, json={"error": {"message": "a key is required"}}))
    with pytest.raises(ConfigError, match="give --api-key"):
        asyncio.run(first_model("http://server", {}, locked))


def test_a_server_that_does_not_answer_is_named() -> None:
    told: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ConfigError, match="no server answers at http://server"):
        asyncio.run(wait_ready("http://server", 0.0, httpx.MockTransport(refuse), told.append))
    assert told == ["http://server"]
    with pytest.raises(ConfigError, match="--base-url server is not a URL"):
        asyncio.run(wait_ready("server", 60.0))


def test_a_server_is_told_to_make_a_profile() -> None:
    def server(request: httpx.Request) -> httpx.Response:
        known = request.url.path == "/stop_profile" and request.headers["x-test"] == "1"
        return httpx.Response(200, json={"trace": "/t.json"}) if known else httpx.Response(404)

    transport = httpx.MockTransport(server)
    assert asyncio.run(profile("http://server", {"X-Test": "1"}, "stop", transport)) == {"trace": "/t.json"}
    with pytest.raises(ConfigError, match="--profiler-config"):
        asyncio.run(profile("http://server", {}, "start", transport))
