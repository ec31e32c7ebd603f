"""What steps are found to take, and who drafts, where a step is launched before the one before it has ended."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.core.plan import PlanDraft
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.engine import SpeculationEngine
from octavo.features.speculation.pace import Measured, Pace, PlannedDecode
from octavo.features.speculation.payload import NAME, SpeculationOption
from octavo.features.speculation.together import Together

OPTIONS = {NAME: msgspec.Raw(msgspec.msgpack.encode(SpeculationOption()))}
PLAIN_S, LAUNCH_S = 0.0094, 0.0005


class Row(SimpleNamespace):
    """A request, by identity."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Ahead:
    """A device whose host plans and launches a step, and then waits for the one before it.

    Attributes:
        row_s: seconds that a step takes longer for each row.
        loads_s: seconds that a launch takes longer the first time that a row has this many drafts.
    """

    row_s = 0.0

    def __init__(self, rows: int, chance: float, draft_s: float, launch_s: float) -> None:
        self.now = self.ends = 0.0
        self.hook = SpeculationEngine(DraftConfig(num_speculative_tokens=5), clock=lambda: self.now)
        self.rows, self.chance, self.draft_s, self.launch_s = rows, chance, draft_s, launch_s
        self.loads_s: dict[int, float] = {}
        self.random = random.Random(1)

    def run(self, tokens: int) -> float:
        """Decode requests of this many tokens; return the speed as a multiple of that without drafts."""
        running: list[Any] = [
            Row(spec=SimpleNamespace(options=OPTIONS), num_output=1, pending=0, inflight=0, wanted=0)
            for _ in range(self.rows)
        ]
        began, flight = self.now, None
        while running or flight:
            launched = self.launch(list(running), tokens) if running else None
            if flight:
                self.retire(*flight)
                running = [row for row in running if row.num_output < tokens]
            flight = launched
        return (tokens * (PLAIN_S + self.row_s * self.rows) + LAUNCH_S) / (self.now - began)

    def launch(self, rows: list[Any], tokens: int) -> tuple[list[Any], list[int], float]:
        counts = [row.wanted for row in rows]
        for row in rows:
            row.pending += 1 + row.wanted
            row.inflight += 1
            left = tokens - row.num_output - row.pending - 1
            row.wanted = max(0, min(self.hook.drafts(row) or 0, left))
        plan = PlanDraft(num_tokens=[1 + n for n in counts], num_drafts=counts, samples=[True] * len(rows))
        plan.proposals = {number: row.wanted for number, row in enumerate(rows) if row.wanted}
        self.hook.on_plan(plan, rows)
        begins = max(self.ends, self.now + LAUNCH_S)
        self.now += self.launch_s if any(counts) else LAUNCH_S
        self.now += self.loads_s.pop(max(counts), 0.0)
        self.ends = max(self.now, begins + PLAIN_S + self.row_s * len(rows) + self.draft_s * sum(counts))
        return rows, counts, self.ends

    def retire(self, rows: list[Any], counts: list[int], ends: float) -> None:
        self.now = max(self.now, ends)
        for row, count in zip(rows, counts, strict=True):
            accepted = 0
            while accepted < count and self.random.random() < self.chance:
                accepted += 1
            row.pending -= 1 + count
            row.inflight -= 1
            row.num_output += 1 + accepted
            if count:
                self.hook.on_verify(row, count, accepted)


@pytest.mark.parametrize(
    ("rows", "chance", "draft_s", "launch_s", "least"),
    [
        (256, 0.8, 0.00002, 0.037, 0.97),  # steps with drafts are not recorded, and their arithmetic takes long
        (256, 0.0, 0.00002, 0.037, 0.97),
        (32, 0.8, 0.00002, 0.022, 0.96),
        (16, 0.8, 0.000006, LAUNCH_S, 2.0),
        (1, 0.8, 0.0002, LAUNCH_S, 2.0),
        (1, 0.0, 0.0002, LAUNCH_S, 0.96),
    ],
)
def test_drafts_gain_or_are_off(rows: int, chance: float, draft_s: float, launch_s: float, least: float) -> None:
    device = Ahead(rows, chance, draft_s, launch_s)
    assert min(device.run(200) for _ in range(3)) > least


@pytest.mark.parametrize("draft_s", [0.00004, 0.00005])
def test_drafts_that_hardly_gain_are_off(draft_s: float) -> None:
    """Requests that have them end at different times, and the last ones leave the device half empty."""
    device = Ahead(256, 0.8, draft_s, 0.025)
    device.row_s = 0.00002
    assert min(device.run(160) for _ in range(3)) > 0.97


def test_a_failed_trial_of_many_rows_says_nothing_of_fewer() -> None:
    device = Ahead(256, 0.8, 0.00002, 0.037)
    device.run(200)
    device.rows, device.draft_s, device.launch_s = 16, 0.000006, LAUNCH_S
    assert device.run(200) > 1.8


@pytest.mark.parametrize("loads_s", [{2: 0.05}, {2: 0.1, 3: 0.05, 4: 0.05}, {2: 0.1, 3: 0.1, 4: 0.1, 5: 0.1}])
def test_kernels_that_steps_with_drafts_load_at_first_are_no_loss(loads_s: dict[int, float]) -> None:
    device = Ahead(16, 0.8, 0.000006, LAUNCH_S)
    device.loads_s = dict(loads_s)
    device.run(200)
    assert device.run(200) > 2.0


def test_a_row_s_drafts_cost_no_more_than_a_step_with_them_takes_longer() -> None:
    """Few of them are accepted, and the time of single steps varies more than with the number of drafts."""
    device = Ahead(16, 0.5, 0.000006, 0.001)
    assert device.run(200) > 1.3


def times(pace: Pace, steps: list[tuple[float, int]], ahead: int) -> list[Measured]:
    """Measurements of steps of 4 rows, each given as the seconds until the next plan and its drafts."""
    now, found = 0.0, []
    for seconds, drafts in steps:
        planned = PlannedDecode(now, 4, drafts, ahead)
        now += seconds
        found += pace.ended(planned, now, plain=1.0)
    return found


def test_the_time_between_plans_is_a_step_s_if_none_is_in_flight() -> None:
    found = times(Pace(), [(1.0, 0), (1.5, 3), (1.0, 0)], ahead=0)
    assert found == [(4, 0, 1.0, 1), (4, 3, 1.5, 1), (4, 0, 1.0, 1)]


@pytest.mark.parametrize("seconds", [(1.0, 3.0), (3.0, 0.1)], ids=["the device", "the launch"])
def test_a_step_s_time_is_found_in_the_next_plan_s(seconds: tuple[float, float]) -> None:
    """Where the device takes long, in the next plan's. If the launch does, the device has nothing left to do."""
    first, second = seconds
    found = times(Pace(), [(1.0, 0), (first, 3), (second, 0), (1.0, 0)], ahead=1)
    assert found == [(4, 0, 1.0, 1), (4, 3, 3.0, 1), (4, 0, 1.0, 1)]


def test_steps_with_drafts_in_a_row_are_measured_together() -> None:
    """Eight, then the rest of them."""
    found = times(Pace(), [(1.0, 2), *[(2.0, 2)] * 9, (2.0, 0), (1.0, 0)], ahead=1)
    assert found == [(4, 2, 2.0, 8), (4, 2, 2.0, 2), (4, 0, 1.0, 1)]


def test_a_step_s_time_is_found_if_its_launch_and_the_device_both_take_long() -> None:
    """The launch takes 1.7, while the step before ends; the device takes 2.4."""
    assert times(Pace(), [(1.0, 0), (1.7, 3), (1.7, 0), (1.0, 0)], ahead=1) == [
        (4, 0, 1.0, 1),
        (4, 3, pytest.approx(2.4), 1),
        (4, 0, 1.0, 1),
    ]


def test_an_interruption_is_forgotten() -> None:
    pace = Pace()
    assert not times(pace, [(1.0, 2), (2.0, 2)], ahead=1)
    pace.interrupt()
    assert times(pace, [(1.0, 0)], ahead=1) == [(4, 0, 1.0, 1)]


def test_trials_that_fail_are_repeated_late() -> None:
    """Half a percent of the time, after two trials that may have loaded kernels."""
    together = Together(5)
    for step in (10, 28):
        assert together.limit(step) == 2
        together.measured(step + 2, 1, saved=2.0, took=3.0)
    assert [together.limit(step) for step in (29, 100, 429, 430)] == [0, 0, 0, 2]
    together.measured(432, 1, saved=2.0, took=4.0)
    assert [together.limit(step) for step in (433, 831, 832)] == [0, 0, 2]


def test_a_trial_that_loads_kernels_is_repeated_soon() -> None:
    together = Together(5)
    assert together.limit(10) == 2
    together.measured(12, 1, saved=2.0, took=100.0)
    assert [together.limit(step) for step in (27, 28)] == [0, 2]
    together.measured(30, 1, saved=2.0, took=1.5)
    assert together.limit(31) == 2
    together.measured(40, 8, saved=16.0, took=12.0)
    assert together.limit(41) == 3


def limits(together: Together, gains: list[float]) -> list[int]:
    """The numbers of drafts that are asked for, if a trial and then eight steps at a time gain as much."""
    seen = []
    for step, gain in enumerate(gains):
        seen.append(together.limit(step))
        together.measured(step, 8, saved=8 * gain, took=8.0)
    return seen


def test_a_number_of_drafts_is_measured_twice_before_it_counts_as_worse() -> None:
    assert limits(Together(5), [1.3, 1.3, 0.2, 1.6, 1.5, 1.5]) == [2, 2, 3, 3, 4, 4]
    assert limits(Together(5), [1.3, 1.3, 0.2, 0.2, 1.3, 1.3]) == [2, 2, 3, 3, 2, 1]


def test_drafts_end_when_they_no_longer_gain() -> None:
    assert limits(Together(1), [1.3, 1.3, 1.2, 0.9, 0.9]) == [1, 1, 1, 1, 0]


def test_fewer_rows_begin_with_the_drafts_of_more() -> None:
    assert limits(Together(5, 4), [0.5]) == [4]


def test_the_number_of_drafts_goes_where_it_gains_the_most() -> None:
    together, seen = Together(5), []
    for step in range(60):
        limit = together.limit(step)
        seen.append(limit)
        together.measured(step, 8, saved=8 * {1: 1.1, 2: 1.3, 3: 1.6, 4: 1.5, 5: 1.4}[limit], took=8.0)
    assert seen[:7] == [2, 2, 3, 4, 4, 3, 3]
    assert set(seen[7:]) <= {2, 3, 4}
    assert seen.count(3) > 40
