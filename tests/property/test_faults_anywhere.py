"""Failures inside the scheduler, at any call that it makes.

At most one request ends with an error, all others get exactly the tokens that are theirs, and every slot and block
comes back.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import Feedback, World, random_requests, worlds

from octavo.cache.block_pool import BlockPool
from octavo.cache.cache import KVCache
from octavo.cache.prefix_tree import PrefixTree
from octavo.core.output import FinishReason
from octavo.core.params import RepetitionDetection
from octavo.core.plan import PlanDraft
from octavo.engine.toy import ToyDevice, ToyStep
from octavo.schedule import outputs, planner, requests, scheduler
from octavo.schedule.counters import Counters
from octavo.schedule.hooks import EngineHook
from octavo.schedule.kv_planner import KvPlanner
from octavo.schedule.planner import Planner
from octavo.schedule.quarantine import Quarantine
from octavo.schedule.requests import Requests, WaitingQueue
from octavo.schedule.scheduler import Scheduler
from octavo.schedule.siblings import Siblings
from octavo.schedule.steady import Steady
from octavo.schedule.step_builder import StepBuilder

KEEPING = [
    (KVCache, ["_drop", "register", "release"]),
    (BlockPool, ["drop"]),
    (PrefixTree, ["insert"]),
    (KvPlanner, ["register"]),
    (Requests, ["_give_back"]),
    (Siblings, ["take_moved"]),
]
COMMIT = [
    *KEEPING,
    (Scheduler, ["_take_row", "_take", "_append", "_answer", "_finish", "_end"]),
    (scheduler, ["append", "committed", "last_news", "times_at_first_token"]),
    (outputs, ["repeats"]),
    (requests, ["released"]),
    (EngineHook, ["on_commit"]),
    (Requests, ["end", "release", "_forget"]),
    (WaitingQueue, ["discard"]),
    (Siblings, ["ending_with"]),
    (Quarantine, ["passed"]),
    (Counters, ["idle"]),
    (Steady, ["take"]),
]
PLAN = [
    *KEEPING,
    (Scheduler, ["_decide", "_repeat", "_freeze"]),
    (Planner, ["decide", "preempt", "_admit", "_allowed", "_add_row", "_plan_row", "_make_way", "_fill"]),
    (planner, ["admitted", "victim_of", "displaced_by"]),
    (KvPlanner, ["share", "unshare", "shortage"]),
    (KVCache, ["match", "fork", "grow", "_allocate", "num_freed_by"]),
    (BlockPool, ["take_blank", "hold", "forget"]),
    (PrefixTree, ["match", "remove"]),
    (Requests, ["start", "preempt", "take_freed"]),
    (WaitingQueue, ["push", "pop", "peek"]),
    (StepBuilder, ["add_row", "add_new"]),
    (PlanDraft, ["freeze"]),
    (Counters, ["step", "left", "admission", "unfilled"]),
    (Steady, ["next", "_grow", "_admitted"]),
    (Feedback, ["on_plan"]),
]
LAUNCH = [(ToyDevice, ["forward", "sample"]), (ToyStep, ["result"]), (Scheduler, ["payload"]), (Counters, ["times"])]


class Fault:
    """Raises at one call of a function, before the call has done its work or after; once.

    Attributes:
        on: whether calls count now.
    """

    def __init__(self, owner: object, name: str, at: int, *, after: bool) -> None:
        self.owner, self.name = owner, name
        self.left, self.after = at, after
        self.on = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        call = getattr(self.owner, self.name)

        def faulty(*args, **kwargs):
            self.left -= self.on
            fails = self.on and self.left == -1
            if fails and not self.after:
                raise KeyError(self.name)
            result = call(*args, **kwargs)
            if fails:
                raise KeyError(self.name)
            return result

        patch.setattr(self.owner, self.name, faulty)

    def within(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        """Calls count while this method runs."""
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            self.on = True
            try:
                return call(*args, **kwargs)
            finally:
                self.on = False

        patch.setattr(owner, name, watched)


def faults(points):
    """One of the places where a failure may be, and when."""
    places = [(owner, name) for owner, names in points for name in names]
    times = st.one_of(st.integers(0, 3), st.integers(0, 60))
    return st.tuples(st.sampled_from(places), times, st.booleans()).map(
        lambda drawn: Fault(*drawn[0], drawn[1], after=drawn[2])
    )


def live(world: World, count: int, abort_rate: float) -> None:
    """A life in which some requests are watched for repetitions, and the fault happens, if its time comes."""
    world = replace(world, faulty=True, rng=random.Random(world.rng.random()))
    never = RepetitionDetection(max_pattern_size=2, min_count=30)
    requests = random_requests(world.rng, count)
    for request in requests:
        if world.rng.random() < 0.3:
            request.params.repetition_detection = never
    world.run(requests, abort_rate)
    world.check()
    world.scheduler.check_idle()
    failed = [key for key, end in world.reasons.items() if end.finish is FinishReason.ERROR]
    assert len(failed) <= 1
    assert all("Internal error: KeyError" in world.reasons[key].error for key in failed)


@given(worlds(), faults(COMMIT), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=1000, deadline=None)
def test_a_fault_while_tokens_are_taken_in(world, fault, count, abort_rate):
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.within(patch, Scheduler, "commit")
        live(world, count, abort_rate)


@given(worlds(), faults(PLAN), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=1000, deadline=None)
def test_a_fault_while_a_step_is_planned(world, fault, count, abort_rate):
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.within(patch, Scheduler, "plan")
        live(world, count, abort_rate)


@given(worlds(), faults(LAUNCH), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=300, deadline=None)
def test_a_fault_around_a_launch(world, fault, count, abort_rate):
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.on = True
        live(world, count, abort_rate)
