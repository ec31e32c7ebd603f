"""The fake must end requests as a real core does, or tests above it prove nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.core.errors import EngineDeadError, InvalidRequestError
from octavo.core.output import TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.fake import FakeEngine, Script, fake_info
from octavo.engine.protocol import EngineClient


async def read(engine: EngineClient, **params: Any) -> list[TokenDelta]:
    params = {"max_tokens": 100} | params
    request = GenerateRequest(id="r", tokens=[7], params=SamplingParams(**params))
    return [delta async for delta in engine.generate(request)]


def play(script: Script, **params: Any) -> tuple[list[int], str | None, int | None]:
    deltas = asyncio.run(read(FakeEngine(script, info=fake_info(eos_token_ids=[2])), **params))
    finishes = [delta.finish for delta in deltas]
    assert finishes[:-1] == [None] * (len(deltas) - 1)
    assert deltas[-1].times is not None
    return [token for delta in deltas for token in delta.tokens], finishes[-1], deltas[-1].stop_reason


@pytest.mark.parametrize(
    ("script", "params", "expected"),
    [
        ([5, 6], {}, ([5, 6, 2], "stop", None)),
        ([5, 2, 6], {}, ([5, 2], "stop", None)),
        ([5, 2, 6], {"ignore_eos": True}, ([5, 2, 6], "length", None)),
        ([2, 2, 2], {"min_tokens": 2}, ([2, 2, 2], "stop", None)),
        ([5, 6, 7], {"max_tokens": 2}, ([5, 6], "length", None)),
        ([5, 6, 7], {"stop_token_ids": [6]}, ([5, 6], "stop", 6)),
        ([6, 6, 6], {"stop_token_ids": [6], "min_tokens": 2}, ([6, 6, 6], "stop", 6)),
    ],
)
def test_endings(script: list[int], params: dict[str, Any], expected: tuple[list[int], str, int | None]) -> None:
    assert play(lambda request: script, **params) == expected


def test_choices_have_scripts_of_their_own() -> None:
    deltas = asyncio.run(read(FakeEngine(lambda request: [[5], [6, 7]]), n=2))
    by_choice = [[token for delta in deltas if delta.index == index for token in delta.tokens] for index in (0, 1)]
    assert by_choice == [[5, 2], [6, 7, 2]]
    assert sum(delta.finish is not None for delta in deltas) == 2


def test_logprobs_as_many_as_asked_for() -> None:
    deltas = asyncio.run(read(FakeEngine(lambda request: [5]), logprobs=3))
    entries = deltas[0].logprobs
    assert entries is not None
    assert entries[0].top_ids[0] == 5
    assert len(entries[0].top_ids) == len(set(entries[0].top_ids)) == len(entries[0].top_logprobs) == 3


def test_an_abort_wakes_a_request_that_waits() -> None:
    async def scenario() -> list[TokenDelta]:
        waiting = asyncio.Event()

        async def pace() -> None:
            waiting.set()
            await asyncio.Event().wait()

        engine = FakeEngine(lambda request: [5], pace=pace)
        task = asyncio.create_task(read(engine, n=2))
        await waiting.wait()
        await engine.abort("r")
        return await task

    assert [delta.finish for delta in asyncio.run(scenario())] == ["abort", "abort"]


def test_pacing_goes_on_after_one_choice_was_aborted() -> None:
    async def scenario() -> list[tuple[int, list[int]]]:
        steps = asyncio.Semaphore(0)
        engine = FakeEngine(lambda request: [5] * 10, pace=steps.acquire)
        seen: list[tuple[int, list[int]]] = []

        async def reader() -> None:
            request = GenerateRequest(id="r", tokens=[7], params=SamplingParams(n=2))
            async for delta in engine.generate(request):
                seen.append((delta.index, delta.tokens))

        task = asyncio.create_task(reader())
        steps.release()
        while len(seen) < 2:
            await asyncio.sleep(0)
        await engine.abort("r", 0)
        while len(seen) < 4:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        return seen

    assert asyncio.run(scenario()) == [(0, [5]), (1, [5]), (0, []), (1, [5])]


def test_death() -> None:
    async def scenario() -> None:
        waiting = asyncio.Event()

        async def pace() -> None:
            waiting.set()
            await asyncio.Event().wait()

        engine = FakeEngine(lambda request: [5], pace=pace)
        task = asyncio.create_task(read(engine))
        await waiting.wait()
        assert engine.stats().num_running == 1
        assert engine.health().ok
        engine.die("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            await task
        assert not engine.health().ok
        assert engine.stats().num_running == 0

    asyncio.run(scenario())


def test_calls_of_features_are_recorded_and_answered() -> None:
    async def main() -> None:
        engine = FakeEngine(lambda request: [5])
        engine.answers["shelf", "count"] = lambda args: args["above"] + 1
        assert await engine.call("shelf", "count", {"above": 2}) == 3
        assert engine.commands == [("call", "shelf", "count", {"above": 2})]
        with pytest.raises(InvalidRequestError, match="no method 'clear'"):
            await engine.call("shelf", "clear", {})

    asyncio.run(main())
