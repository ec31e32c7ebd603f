"""Failures inside the scheduler, at any call of any of its functions.

At most one request ends with an error, all others get exactly the tokens that are theirs, and every slot and block
comes back. The functions are found by inspection, so that nothing new is left out.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import random
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import Feedback, World, random_requests, worlds

import octavo.cache
import octavo.schedule
from octavo.core.output import FinishReason
from octavo.core.params import RepetitionDetection
from octavo.core.plan import PlanDraft
from octavo.engine.toy import ToyDevice, ToyStep
from octavo.schedule.counters import Counters
from octavo.schedule.pages import PageLoads
from octavo.schedule.requests import Requests
from octavo.schedule.scheduler import Scheduler
from octavo.schedule.tiers import Tiers

Point = tuple[Any, str]
"""A class or module, and the name of a function that is looked up there."""

HANDOVERS = {"commit", "plan", "_take_news"}
"""Methods of the scheduler after whose work its result belongs to the caller: nothing inside is left to fail."""
RECOVERY = [(Requests, "rebuild"), (Tiers, "lost"), (PageLoads, "lost")]
"""Calls that repair the books after a failure; a second failure meanwhile is not survived."""


def modules(package: ModuleType) -> list[ModuleType]:
    return [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]


def methods(owner: type) -> Iterator[Point]:
    """The functions that a class defines; special methods, properties and class methods are left out."""
    own = ((name, value) for name, value in vars(owner).items() if isinstance(value, FunctionType))
    return ((owner, name) for name, _ in own if not name.startswith("__"))


def functions(module: ModuleType) -> Iterator[Point]:
    """Functions at the place from which the module calls them, and the methods of its own classes."""
    for name, value in vars(module).items():
        if not (getattr(value, "__module__", None) or "").startswith(("octavo.schedule", "octavo.cache")):
            continue
        if isinstance(value, FunctionType) and not inspect.isgeneratorfunction(value):
            yield module, name
        elif inspect.isclass(value) and value.__module__ == module.__name__ and has_code(value):
            yield from methods(value)


def has_code(owner: type) -> bool:
    return not issubclass(owner, enum.Enum) and not getattr(owner, "_is_protocol", False)


MODULES = [module for package in (octavo.cache, octavo.schedule) for module in modules(package)]
POINTS = [*(point for module in MODULES for point in functions(module)), *methods(PlanDraft), (Feedback, "on_plan")]
WITHIN = [(owner, name) for owner, name in POINTS if owner is not Scheduler or name not in HANDOVERS]
LAUNCH = [
    (ToyDevice, "forward"),
    (ToyDevice, "sample"),
    (ToyStep, "result"),
    (Scheduler, "payload"),
    (Counters, "times"),
]


class Fault:
    """Raises at one call of a function, before the call has done its work or after; once.

    Attributes:
        on: whether calls count now.
    """

    def __init__(self, owner: object, name: str, at: int, *, after: bool) -> None:
        self.owner, self.name = owner, name
        self.left, self.after = at, after
        self.on = False

    def __repr__(self) -> str:
        where = getattr(self.owner, "__name__", self.owner)
        return f"Fault({where}.{self.name}, call {self.left}, {'after' if self.after else 'before'})"

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
        """Calls count while this method runs, except during recovery."""
        self._switch(patch, owner, name, on=True)
        for repairing, its_name in RECOVERY:
            self._switch(patch, repairing, its_name, on=False)

    def _switch(self, patch: pytest.MonkeyPatch, owner: type, name: str, *, on: bool) -> None:
        call = getattr(owner, name)

        def watched(*args, **kwargs):
            before, self.on = self.on, on
            try:
                return call(*args, **kwargs)
            finally:
                self.on = before

        patch.setattr(owner, name, watched)


def faults(points: list[Point]):
    """One of the places where a failure may be, and when."""
    times = st.one_of(st.integers(0, 3), st.integers(0, 60))
    return st.tuples(st.sampled_from(points), times, st.booleans()).map(
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


def test_the_scheduler_s_functions_are_found():
    found = {getattr(owner, "__name__", "") + "." + name for owner, name in WITHIN}
    assert {"Scheduler._take_row", "Planner._admit", "KVCache.grow", "octavo.schedule.scheduler.append"} <= found
    assert len(WITHIN) > 100


@given(worlds(), faults(WITHIN), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=examples(1000), deadline=None)
def test_a_fault_while_tokens_are_taken_in(world, fault, count, abort_rate):
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.within(patch, Scheduler, "commit")
        live(world, count, abort_rate)


@given(worlds(), faults(WITHIN), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=examples(1000), deadline=None)
def test_a_fault_while_a_step_is_planned(world, fault, count, abort_rate):
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.within(patch, Scheduler, "plan")
        live(world, count, abort_rate)


@given(worlds(), faults(LAUNCH), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=examples(300), deadline=None)
def test_a_fault_around_a_launch(world, fault, count, abort_rate):
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.on = True
        live(world, count, abort_rate)
