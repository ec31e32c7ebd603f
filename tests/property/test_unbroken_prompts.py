"""Ranges of prompts that are computed in one step, whatever else happens to their requests."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import LAYOUTS, World, random_requests, worlds

from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.schedule.hooks import EngineHook

NAME = "runs"
OPTION = {NAME: msgspec.Raw(b"\x90")}


class Runs(EngineHook):
    """Some tokens of each prompt belong together; its first ones are those of others, too."""

    name = NAME

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.begun_inside = 0

    def unbroken(self, spec):
        rng = random.Random(spec.tokens[0])
        found, at = [], 0
        while (start := at + rng.randrange(4)) + 2 <= len(spec.tokens):
            at = min(start + rng.randint(2, self.longest), len(spec.tokens))
            found.append((start, at))
        return found

    def on_plan(self, draft, rows):
        for request, count in zip(rows, draft.num_tokens, strict=True):
            end = request.num_computed
            for low, high in request.spec.unbroken:
                assert not low < end < high, f"a step ends at {end}, in {low} to {high}"
                self.begun_inside += low < end - count < high


def asked(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    return [msgspec.structs.replace(one, options=OPTION) for one in requests]


@given(worlds(LAYOUTS), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=examples(300), deadline=None)
def test_any_life_of_an_engine(world, count, abort_rate):
    world = replace(world, extra=(Runs(world.budget),), rng=random.Random(world.rng.random()))
    world.run(asked(random_requests(world.rng, count)), abort_rate)
    world.check()


def make_world(hook: Runs, **options) -> World:
    plain = {"depth": 0, "num_drafts": 0, "num_blocks": 80, "budget": 8, "policy": "fcfs", "share": True}
    return World(rng=random.Random(1), extra=(hook,), **plain | options)


def request(name: str, tokens: list[int], max_tokens: int = 4) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return GenerateRequest(id=name, tokens=tokens, params=params, options=OPTION)


def test_a_cached_prefix_may_end_inside():
    hook = Runs(8)
    hook.unbroken = lambda spec: [(2, 10)]
    world = make_world(hook)
    tokens = list(range(1, 11))
    for name in "ab":
        world.run([request(name, tokens)], 0.0)
    world.check()
    assert hook.begun_inside == 1, "at 8, behind two blocks"


def test_a_range_longer_than_a_step():
    hook = Runs(8)
    hook.unbroken = lambda spec: [(0, 9)]
    with pytest.raises(InvalidRequestError, match=r"9 tokens that must be computed in one step.* has at most 8"):
        make_world(hook).loop.add(request("a", [1] * 12))


@pytest.mark.parametrize("waits", [False, True], ids=["begun", "waiting"])
def test_others_that_come_later_do_not_take_its_budget(waits):
    """No request is admitted to the budget that rows which decode leave, before the range of eight has had a step."""
    hook = Runs(8)
    hook.unbroken = lambda spec: [(3, 11)] if spec.id == "long" else []
    world = make_world(hook)
    steps: list[SimpleNamespace] = []
    note = hook.on_plan

    def on_plan(draft, rows):
        note(draft, rows)
        steps.append(SimpleNamespace(rows=[row.id for row in rows], tokens=list(draft.num_tokens)))

    hook.on_plan = on_plan
    first = [request(f"first {i}", [i + 1], 6 + i) for i in range(3)]
    long = request("long", [9] * (11 if waits else 12))
    if waits:
        hook.unbroken = lambda spec: [(0, 8)] if spec.id == "long" else []
    for one in [*first, long, *(request(f"later {i}", [i + 20], 6) for i in range(6))]:
        world.ask(one)
    world.run([], 0.0)
    world.check()
    whole = next(i for i, step in enumerate(steps) if ("long", 8) in zip(step.rows, step.tokens, strict=True))
    assert whole > 2
    assert {name for step in steps[:whole] for name in step.rows} <= {*steps[0].rows, "long"}
