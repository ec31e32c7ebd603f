"""Answers that the engine aborts, as for a pause or a sleep, count as incomplete in every API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from batch_kit import begin, ended, line, results, service_of
from batch_kit import running as running_batches
from server_kit import HELLO, Answer, House, Visitor, eventually, make_house, saying

from octavo.config import ServerConfig

TEXT = "one two three"


class Gate:
    """Lets an engine compute its first tokens, and the rest once it is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.steps = 0

    async def __call__(self) -> None:
        self.steps += 1
        if self.steps > 4:
            await self.open.wait()

    async def abort_all(self, house: House) -> None:
        await eventually(lambda: self.steps > 4)
        assert await house.engine.abort_named(None) == 1
        self.open.set()


def aborted(path: str, body: dict[str, Any]) -> Answer:
    async def run() -> Answer:
        gate = Gate()
        house = make_house(saying(TEXT), pace=gate)
        visitor = Visitor(house.app, path, body)
        await gate.abort_all(house)
        return await visitor.whole()

    return asyncio.run(run())


def test_a_response_is_incomplete() -> None:
    response = aborted("/v1/responses", {"input": "Hello"}).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "abort"})
    assert response["output"][0]["status"] == "incomplete"
    stream = aborted("/v1/responses", {"input": "Hello", "stream": True}).body.decode()
    assert "event: response.incomplete\n" in stream
    assert "event: response.completed\n" not in stream


def test_a_chat_says_so() -> None:
    assert aborted("/v1/chat/completions", HELLO).json()["choices"][0]["finish_reason"] == "abort"


def test_a_message_of_anthropic_is_an_error() -> None:
    body = HELLO | {"model": "toy", "max_tokens": 50}
    whole = aborted("/v1/messages", body)
    assert (whole.status, whole.json()["error"]["type"]) == (503, "overloaded_error")
    stream = aborted("/v1/messages", body | {"stream": True}).body.decode()
    assert "event: error\n" in stream
    assert "overloaded_error" in stream
    assert "end_turn" not in stream


def test_a_batch_runs_the_line_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.batch.execute._FIRST_WAIT_S", 0.001)

    async def run() -> None:
        gate = Gate()
        house = make_house(saying(TEXT), ServerConfig(jobs_dir=str(tmp_path)), pace=gate)
        async with running_batches(house.app) as app:
            batch_id = await begin(app, [line("a", max_tokens=50)])
            batch = await service_of(app).get(batch_id)
            await gate.abort_all(house)
            await eventually(lambda: batch.ended)
            done = await ended(app, batch_id)
            assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            (one,) = await results(app, done["output_file_id"])
            assert one["response"]["body"]["choices"][0]["message"]["content"] == TEXT
            assert len(house.engine.requests) == 2

    asyncio.run(run())
