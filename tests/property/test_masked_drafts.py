"""A feature that reads drafts before they are verified: it sees those that the device holds, and may cut them.

Lives of an engine as in `test_engine_properties`, at depths 0 to 2, with aborts and preemptions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import world_kit
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import World, random_requests

from octavo.core.plan import PlanDraft, StepPlan
from octavo.engine.toy import VOCAB, ToyDevice, ToyStep
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import POLICIES
from octavo.schedule.request import Request


class Reader(EngineHook):
    """Sends the drafts of each row to the device with the payload, and ends requests at some tokens."""

    name = "reader"

    def __init__(self, rng: random.Random, ends: frozenset[int], *, at_launch: bool) -> None:
        self.rng = rng
        self.ends = ends
        self.at_launch = at_launch
        self.drafts_of: dict[Request, tuple[int, list[int]]] = {}
        self.num_rows = self.num_cut = 0

    def on_drafts(self, request: Request, drafts: Sequence[int]) -> int:
        left = self.rng.choice([len(drafts), self.rng.randint(0, len(drafts))])
        self.num_cut += left < len(drafts)
        self.drafts_of[request] = len(request.tokens), list(drafts)
        return left

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        if any(request.inflight > 1 for request in rows):
            draft.needs_feedback = True
        elif self.at_launch:
            draft.payload[self.name] = self._drafts(draft.slots, draft.num_drafts, rows)

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Any:
        return None if self.name in plan.payload else self._drafts(plan.slots, plan.num_drafts, rows)

    def _drafts(self, slots: Sequence[int], counts: Sequence[int], rows: Sequence[Request]) -> dict[int, list[int]]:
        found = {}
        for slot, count, request in zip(slots, counts, rows, strict=True):
            if count and request.finish is None:
                length, drafts = self.drafts_of[request]
                assert length == len(request.tokens), "the drafts after another token"
                found[slot] = drafts[:count]
                self.num_rows += 1
        return found

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        assert not self.ends.intersection(tokens[:-1]), "tokens after the end"
        return tokens[-1] in self.ends

    def on_release(self, request: Request) -> None:
        self.drafts_of.pop(request, None)


class CheckingDevice(ToyDevice):
    """Compares the payload with the drafts of its slots when a step is sampled."""

    def sample(self, step: ToyStep, payload: dict[str, Any]) -> None:
        told = (step.plan.payload | payload).get("reader", {})
        self._enqueue(lambda: self._check_drafts(step, told))
        super().sample(step, payload)

    def _check_drafts(self, step: ToyStep, told: dict[int, list[int]]) -> None:
        for slot, count in zip(step.plan.slots, step.plan.num_drafts, strict=True):
            if slot in told:
                assert self._slots[slot].drafts[:count] == told[slot], "other drafts than the device's"


def life(seed: int, depth: int, most: int, ends: frozenset[int]) -> tuple[World, Reader]:
    rng = random.Random(seed)
    reader = Reader(rng, ends, at_launch=depth == 0 and rng.random() < 0.5)
    reader.opt_in = False
    world = World(
        rng=rng,
        depth=depth,
        num_drafts=most,
        num_blocks=rng.choice([9, 14, 20, 80]),
        budget=rng.choice([6, 9, 16, 64]),
        policy=rng.choice(sorted(POLICIES)),
        share=rng.random() < 0.5,
        right_drafts=rng.choice([0.0, 0.3, 0.6, 0.9, 1.0]),
        extra=(reader,),
        also_ends=ends,
    )
    return world, reader


@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(1, 7), st.sampled_from([0.0, 0.05]))
@settings(max_examples=120, deadline=None)
def test_features_read_the_drafts_that_the_device_verifies(seed: int, depth: int, most: int, aborts: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_kit, "ToyDevice", CheckingDevice)
        ends = frozenset(random.Random(seed).sample(range(1, VOCAB), 3))
        world, reader = life(seed, depth, most, ends)
    world.run(random_requests(world.rng, 8), aborts)
    world.check()
    assert not reader.drafts_of


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_some_drafts_are_read_and_some_are_cut(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_kit, "ToyDevice", CheckingDevice)
    world, reader = life(depth, depth, 5, frozenset({7}))
    world.run(random_requests(world.rng, 200), 0.01)
    world.check()
    assert reader.num_rows > 10
    assert reader.num_cut > 10
    assert any(tokens[-1:] == [7] for tokens in world.outputs.values())


def test_other_drafts_would_be_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(world_kit, "ToyDevice", CheckingDevice)
    world, reader = life(1, 1, 5, frozenset())
    read = reader.on_drafts
    monkeypatch.setattr(reader, "on_drafts", lambda request, drafts: read(request, [*drafts[1:], 1][: len(drafts)]))
    with pytest.raises(TypeError):  # there is no way to recover
        world.run(random_requests(world.rng, 40), 0.0)
    assert "other drafts" in caplog.text
