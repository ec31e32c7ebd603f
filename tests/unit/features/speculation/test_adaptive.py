"""How many drafts a request gets, from a clock that the test sets."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.core.plan import PlanDraft
from octavo.features.speculation.acceptance import Acceptance
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.costs import StepCosts
from octavo.features.speculation.engine import SpeculationEngine
from octavo.features.speculation.payload import NAME, SpeculationOption

OPTIONS = {NAME: msgspec.Raw(msgspec.msgpack.encode(SpeculationOption()))}


class Row(SimpleNamespace):
    """A request, by identity."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class World:
    """An engine whose requests accept each draft with a chance, in steps that take as long as a rule says."""

    def __init__(
        self, rows: int, chance: float, draft_s: float, *, drafting_s: float = 0.0, config: DraftConfig | None = None
    ) -> None:
        self.now = 0.0
        self.hook = SpeculationEngine(config or DraftConfig(), clock=lambda: self.now)
        self.requests: list[Any] = [self.new_request() for _ in range(rows)]
        self.chance, self.draft_s, self.drafting_s = chance, draft_s, drafting_s
        self.wanted = [0] * rows
        self.random = random.Random(1)

    def new_request(self) -> Row:
        return Row(spec=SimpleNamespace(options=OPTIONS), num_output=1, pending=0, inflight=1)

    def step(self) -> None:
        counts, rows = self.wanted, len(self.requests)
        plan = PlanDraft(num_tokens=[1 + n for n in counts], num_drafts=counts, samples=[True] * rows)
        self.hook.on_plan(plan, self.requests)
        self.now += 0.01 + self.draft_s * sum(counts) + self.drafting_s * any(counts)
        for request, count in zip(self.requests, counts, strict=True):
            accepted = 0
            while accepted < min(count, self.hook.max_chain) and self.random.random() < self.chance:
                accepted += 1
            if count:
                self.hook.on_verify(request, count, accepted)
            request.num_output += 1 + accepted
        self.wanted = [self.hook.drafts(request) or 0 for request in self.requests]

    def run(self, steps: int) -> tuple[float, float]:
        """Return tokens a second without and with drafts, and mean drafts of a row in the second half."""
        began, before = self.now, sum(r.num_output for r in self.requests)
        drafts = 0
        for step in range(steps):
            self.step()
            drafts += sum(self.wanted) if step >= steps // 2 else 0
        rate = (sum(r.num_output for r in self.requests) - before) / (self.now - began)
        return rate / (len(self.requests) / 0.01), drafts / len(self.requests) / (steps - steps // 2)


@pytest.mark.parametrize(
    ("rows", "chance", "draft_s", "least_gain", "drafts"),
    [
        (1, 0.9, 0.001, 2.0, (4, 7)),  # cheap and right
        (1, 0.9, 0.009, 0.97, (0, 1)),  # as dear as a step
        (1, 0.0, 0.001, 0.97, (0, 0.3)),  # always wrong
        (1, 0.5, 0.002, 1.05, (0.7, 3)),
        (64, 0.8, 0.00015, 0.98, (0, 0.1)),  # the device computes as much as it can
        (256, 0.8, 0.00004, 0.98, (0, 0.1)),  # it does, and every step before had all drafts
        (64, 0.8, 0.000001, 2.0, (5, 7)),  # it does not
    ],
)
def test_drafts_are_chosen_by_what_they_gain(
    rows: int, chance: float, draft_s: float, least_gain: float, drafts: tuple[float, float]
) -> None:
    gain, mean = World(rows, chance, draft_s).run(2000 if rows == 1 else 400)
    assert gain > least_gain
    assert drafts[0] <= mean <= drafts[1]


TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("rows", "chance", "draft_s", "least_gain", "drafts"),
    [
        (1, 0.8, 0.0003, 1.8, (6.5, 7)),  # one of each depth is likely right
        (4, 0.8, 0.0003, 1.3, (6, 7)),
        (1, 0.1, 0.001, 0.97, (0, 0.5)),
        (64, 0.8, 0.000001, 1.8, (2, 3)),  # many requests get chains
    ],
)
def test_trees_are_drafted_whole_or_not(
    rows: int, chance: float, draft_s: float, least_gain: float, drafts: tuple[float, float]
) -> None:
    world = World(rows, chance, draft_s, config=DraftConfig(method="mtp", speculative_token_tree=TREE))
    seen = set()
    drafts_of = world.hook.drafts
    world.hook.drafts = lambda request: seen.add(found := drafts_of(request)) or found  # type: ignore[method-assign]
    gain, mean = world.run(2000 if rows < 8 else 400)
    assert gain > least_gain
    assert drafts[0] <= mean <= drafts[1]
    assert seen <= ({0, len(TREE)} if rows < 8 else {0, 1, 2, 3})


def test_drafts_are_tried_again_later() -> None:
    world = World(1, 0.0, 0.001)
    world.run(1000)
    world.chance = 1.0
    assert world.run(4000)[1] > 5


@pytest.mark.parametrize("rows", [1, 4])
def test_short_requests_do_not_each_try_a_head_that_is_wrong(rows: int) -> None:
    """A head is as often right for one request as for another, so their trials become rare together."""
    head = DraftConfig(method="eagle", model="head", num_speculative_tokens=3)
    world = World(rows, 0.05, 0.001, drafting_s=0.005, config=head)
    drafted = steps = 0
    for _ in range(60):
        for _ in range(80):
            world.step()
            drafted += any(world.wanted)
            steps += 1
        for request in world.requests:
            world.hook.on_release(request)
        world.requests = [world.new_request() for _ in world.requests]
        world.wanted = [0] * rows
    assert drafted < 0.02 * steps
    world.chance = 1.0  # another kind of text
    assert world.run(4000)[1] > 2


def test_steps_that_drafts_make_slow_are_avoided() -> None:
    """A step with drafts takes three times as long, whatever their number."""
    gain, mean = World(1, 0.5, 0.0, drafting_s=0.02).run(3000)
    assert gain > 0.95
    assert mean < 0.2


def test_without_adaption_the_number_is_fixed() -> None:
    world = World(2, 0.0, 1.0)
    world.hook = SpeculationEngine(DraftConfig(adaptive=False, num_speculative_tokens=3))
    world.hook.on_verify(world.requests[0], 3, 0)
    assert world.hook.drafts(world.requests[0]) is None


def test_metrics() -> None:
    world = World(1, 1.0, 0.001)
    world.run(300)
    found = {one.name: one.values for one in world.hook.metrics()}
    drafts, accepted = (found[f"spec_decode_num_{name}_tokens"][""] for name in ("draft", "accepted"))
    assert 0 < accepted == drafts
    assert sum(found["spec_decode_num_accepted_tokens_per_pos"].values()) == accepted
    assert found["spec_decode_num_drafts"][""] > 0
    assert found["spec_decode_gain_ms_per_token"][""] == pytest.approx(10 - (10 + 7) / 8, rel=0.2)


def test_costs_are_a_line_over_drafts() -> None:
    costs = StepCosts()
    assert costs.step(4, 2) == (0.0, 0.0)
    for drafts in (0, 3, 0, 7, 5, 0):
        costs.add(4, drafts, 0.01 + (0.002 + 0.001 * drafts if drafts else 0))
    assert costs.plain(4) == pytest.approx(0.01)
    assert costs.step(4, 10) == pytest.approx((0.012, 0.01), rel=0.01)
    costs.add(4, 0, 3.0)  # a pause
    assert costs.plain(4) == pytest.approx(0.01)


def test_first_steps_that_load_kernels_are_forgotten() -> None:
    costs = StepCosts()
    for seconds in (0.3, 0.01, 0.01, 0.01, 0.0001, 0.01):
        costs.add(4, 0, seconds)
        costs.add(4, 8, 2 * seconds)
    assert costs.plain(4) == pytest.approx(0.01)
    assert sum(costs.step(4, 8)) == pytest.approx(0.02)


def test_steps_without_drafts_are_measured_too() -> None:
    costs = StepCosts()
    for _ in range(5):
        assert not costs.needs_plain(7)
        costs.add(4, 8, 0.02)
    assert costs.needs_plain(4)
    for _ in range(3):
        costs.add(4, 0, 0.01)
    assert not costs.needs_plain(4)


def test_acceptance_forgets() -> None:
    one = Acceptance()
    for _ in range(60):
        one.add(4, 4)
    assert one.share > 0.95
    for _ in range(60):
        one.add(4, 0)
    assert one.share < 0.2
    assert Acceptance(one).share == pytest.approx(0.3)


@pytest.mark.parametrize("repeats", [False, True])
def test_searches_that_find_nothing_become_rare_together(repeats: bool) -> None:
    """Two requests that began to search at different times soon search in the same eighth of the steps."""
    world = World(2, 1.0, 0.001)
    hook, (first, second) = world.hook, world.requests
    asked: list[list[int]] = []
    for step in range(200):
        rows = [first] if step < 5 else [first, second]
        wishes = [row for row, request in enumerate(rows) if hook.drafts(request)]
        count = len(rows)
        plan = PlanDraft(num_tokens=[1] * count, num_drafts=[0] * count, samples=[True] * count)
        plan.proposals, plan.repeats = dict.fromkeys(wishes, 3), repeats and step > 5
        hook.on_plan(plan, rows)
        asked.append(wishes)
    assert all(wishes in ([], [0, 1]) for wishes in asked[-100:])
    assert sum(map(bool, asked[-96:])) == 12


def test_steps_without_drafts_are_measured_if_all_so_far_had_some() -> None:
    world = World(256, 0.8, 0.00004)
    world.wanted = [7] * 256
    gain, mean = world.run(400)
    assert gain > 0.95
    assert mean < 0.2


def test_many_rows_try_together() -> None:
    """A step of 256 rows takes more than twice as long if any of them has drafts."""
    world = World(256, 0.8, 0.000008, drafting_s=0.012)
    world.wanted = [7] * 256
    world.run(100)
    gain, mean = world.run(300)
    assert gain > 0.98
    assert mean < 0.5


def test_many_rows_try_no_trees() -> None:
    """Not even the trial after a pause that began with few rows."""
    paths = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
    head = DraftConfig(method="eagle", model="head", num_speculative_tokens=6, speculative_token_tree=paths)
    world = World(4, 0.02, 0.01, config=head)
    world.run(200)
    world.requests += [world.new_request() for _ in range(12)]
    world.wanted += [0] * 12
    tried = set()
    for _ in range(2000):
        world.step()
        tried |= set(world.wanted)
    assert tried > {0}
    assert max(tried) <= 2, "chains"
