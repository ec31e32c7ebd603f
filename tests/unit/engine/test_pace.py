"""Steps are planned late, and yet the device does not wait for them. Time is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from core_kit import ask, client_of, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.loop import EngineLoop
from octavo.engine.pace import Pace

HOST = 0.001


class Run(NamedTuple):
    """For each step but the first: how long the device waited for it, and how long before its start it was planned."""

    idle: list[float]
    lead: list[float]


def run(times: Iterable[float], pace: Pace, *, host: float = HOST, tokens: int = 64, blocks: int = 500) -> Run:
    """Run steps of one size, with one launched ahead."""
    now, free = 0.0, 0.0
    ends: list[float] = []
    idle, lead = [], []
    for number, taken in enumerate(times):
        now += pace.spare(now)
        planned, now = now, now + host
        start = max(free, now)
        if number:
            idle.append(start - free)
            lead.append(start - planned)
        free = start + taken
        ends.append(free)
        pace.launched(tokens, rows=64, blocks=blocks, spent=host, at=now)
        if len(ends) > 1:
            end = ends.pop(0)
            waited, now = max(0.0, end - now), max(now, end)
            pace.ended(waited, now)
    return Run(idle, lead)


def test_steps_are_planned_shortly_before_the_device_is_done() -> None:
    found = run([0.01] * 30, Pace())
    assert max(found.idle) == 0
    assert found.lead[0] == pytest.approx(0.01)
    assert max(found.lead[10:]) < 0.004


@given(st.lists(st.floats(1.0, 1.1), min_size=5, max_size=60), st.floats(0.0005, 0.5))
def test_the_device_never_waits_if_times_differ_little(times: list[float], scale: float) -> None:
    assert max(run([scale * time for time in times], Pace(), host=0.0004).idle) == pytest.approx(0, abs=1e-9)


def test_a_device_that_got_faster_waits_a_few_times() -> None:
    found = run([*[0.04] * 20, *[0.01] * 40], Pace())
    assert sum(found.idle) < 0.06
    assert max(found.idle[-20:]) == 0
    assert max(found.lead[-20:]) < 0.005


def test_single_long_steps_are_not_expected_again() -> None:
    assert sum(run([0.01, 2.0, 0.01, 0.01, 0.01, 0.01, 3.0, *[0.01] * 20], Pace()).idle) == 0


def test_steps_of_an_unknown_size_and_those_of_a_slow_host_are_planned_at_once() -> None:
    pace = Pace()
    run([0.01] * 20, pace)
    pace.forget()
    pace.launched(16, rows=16, blocks=500, spent=HOST, at=1.0)
    assert pace.spare(1.0) == 0
    assert max(run([0.01] * 20, Pace(), host=0.008).idle) == 0


def test_fewer_tokens_and_shorter_contexts_take_less_time() -> None:
    pace = Pace()
    run([0.02] * 20, pace, tokens=79)
    pace.forget()

    def spare(tokens: int, blocks: int) -> float:
        pace.launched(tokens, rows=64, blocks=blocks, spent=HOST, at=1.0)
        found = pace.spare(1.0)
        pace.forget()
        return found

    whole = spare(79, 500)
    assert whole == spare(79, 900) > spare(64, 500) > 0
    assert spare(79, 100) < whole / 3


def test_who_arrives_in_the_spare_time_is_part_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spare(loop: EngineLoop) -> float:
        stats = loop.stats()
        return 0.0 if stats.num_waiting + stats.num_running > 1 or stats.num_steps else 60.0

    async def answer() -> tuple[int, int]:
        async with client_of(tmp_path) as (client, process):
            await asyncio.gather(*(tokens_of(client, ask(name)) for name in "ab"))
            stats = process.loop.stats()
            return stats.step_rows, stats.num_steps

    monkeypatch.setattr(EngineLoop, "spare_s", property(spare))
    rows, steps = asyncio.run(answer())
    assert rows == 2 * steps > 0
