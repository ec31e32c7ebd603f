"""A client that leaves frees its request, at whatever moment it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from server_kit import HELLO, Visitor, ask, eventually, make_house, saying

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def never() -> None:
    await asyncio.Event().wait()


def in_time(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


def test_leaving_in_the_middle_of_a_stream() -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(3)
        house = make_house(saying("a long answer"), pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, CHAT, HELLO | {"stream": True})
        await visitor.heard.wait()
        assert house.lifecycle.inflight == 1
        assert house.lifecycle.active == house.engine.running
        assert len(house.engine.running) == 1
        visitor.leaves.set()
        answer = await visitor.whole()
        assert house.engine.abandoned == [house.engine.requests[0].id]
        assert not house.engine.running
        assert not house.lifecycle.active
        assert house.lifecycle.inflight == 0
        assert not answer.ended
        other = asyncio.create_task(ask(house.app, CHAT, HELLO))
        for _ in range(20):
            steps.release()
        assert (await other).json()["choices"][0]["message"]["content"] == "a long answer"

    in_time(scenario)


@pytest.mark.parametrize(
    ("path", "body", "requests"),
    [
        (CHAT, HELLO, 1),
        (CHAT, HELLO | {"stream": True}, 1),
        (CHAT, HELLO | {"n": 3}, 1),
        (TEXT, {"prompt": ["a", "b", "c"]}, 3),
        (TEXT, {"prompt": ["a", "b", "c"], "stream": True}, 3),
    ],
)
def test_leaving_before_the_first_token(path: str, body: dict[str, Any], requests: int) -> None:
    async def scenario() -> None:
        house = make_house(saying("x"), pace=never)
        visitor = Visitor(house.app, path, body)
        await eventually(lambda: len(house.engine.running) == requests)
        visitor.leaves.set()
        answer = await visitor.whole()
        assert sorted(house.engine.abandoned) == sorted(request.id for request in house.engine.requests)
        assert not house.engine.running
        assert not house.lifecycle.active
        assert answer.status in (0, 499)

    in_time(scenario)


def test_leaving_while_the_body_is_sent() -> None:
    async def scenario() -> None:
        house = make_house(saying("x"))
        visitor = Visitor(house.app, CHAT, parts=[b'{"mess'], headers={})
        visitor._parts = []
        visitor.leaves.set()
        await visitor.whole()
        assert house.engine.requests == []
        assert house.lifecycle.inflight == 0

    in_time(scenario)


def test_a_cancelled_task_frees_its_request() -> None:
    async def scenario() -> None:
        for body in (HELLO, HELLO | {"stream": True}):
            house = make_house(saying("x"), pace=never)
            visitor = Visitor(house.app, CHAT, body)
            await eventually(lambda: len(house.engine.running) == 1)  # noqa: B023
            visitor.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await visitor.task
            assert len(house.engine.abandoned) == 1
            assert house.lifecycle.inflight == 0

    in_time(scenario)


def test_one_failing_prompt_ends_the_others() -> None:
    async def scenario() -> None:
        def script(request: Any) -> list[int]:
            if len(request.tokens) == 2:
                raise RuntimeError("broken")
            return [5] * 100

        house = make_house(script)
        answer = await ask(house.app, TEXT, {"prompt": ["a", "bb", "c"], "max_tokens": 100})
        assert answer.status == 500
        assert not house.engine.running
        assert not house.lifecycle.active

    in_time(scenario)


def test_a_request_that_is_done_is_not_aborted() -> None:
    async def scenario() -> None:
        house = make_house(saying("abc"))
        for body in (HELLO, HELLO | {"stream": True}, HELLO | {"stream": True, "n": 3}):
            await ask(house.app, CHAT, body)
        assert house.engine.aborts == []
        finished = (await ask(house.app, "/metrics", method="GET")).body.decode()
        assert 'finished_reason="abort",model_name="toy"} 0.0' in finished

    in_time(scenario)


def test_two_requests_with_one_id_do_not_meet() -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(0)
        house = make_house(lambda request: request.tokens[:1] * 3, pace=steps.acquire)  # type: ignore[arg-type]
        bodies = [{"prompt": letter, "request_id": "same"} for letter in "ab"]
        visitors = [Visitor(house.app, TEXT, body, headers={"x-request-id": "same"}) for body in bodies]
        await eventually(lambda: len(house.engine.running) == 2)
        for _ in range(20):
            steps.release()
        answers = [(await visitor.whole()).json() for visitor in visitors]
        assert [answer["choices"][0]["text"] for answer in answers] == ["aaa", "bbb"]
        assert [answer["id"] for answer in answers] == ["cmpl-same", "cmpl-same"]

    in_time(scenario)
