"""Adapters on the toy device: random requests, loads, unloads, evictions, preemptions, aborts and failures.

The device checks that every row has the adapter that its request named, and that the adapter's blocks hold its pages
when the step runs, which is as late as possible.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_toy import INVOCATION, LoraDevice, ToyWorker, fake_files, folders, option
from world_kit import LAYOUTS, World, random_requests, worlds

from octavo.core.errors import EngineStateError, InvalidRequestError, ModelFileError, ModelNotFoundError
from octavo.core.output import FinishReason
from octavo.features.lora.engine import LoraEngine
from octavo.features.lora.settings import LoraSettings

RANKS = {"a": 1, "b": 2, "c": 3, "d": 1, "head": 2, "called": 1, "called too": 2}


class Driver(LoraEngine):
    """The engine half, with a worker half that takes its time, and clients that load and unload at random."""

    def __init__(self, given, worker: ToyWorker, paths: dict[str, str]) -> None:
        self.now = 0.0
        super().__init__(given, lambda: self.now)
        self.worker, self.paths = worker, paths
        self.calls: list[Future] = []
        self.churn = 0.0
        self.answered = self.refused = 0

    def turn(self) -> None:
        self.now += 0.05
        self.worker.turn()
        if self.worker.rng.random() < self.churn:
            self.act()
        super().turn()
        for call in [one for one in self.calls if one.done()]:
            self.calls.remove(call)
            self.answered += 1
            error = call.exception()
            assert error is None or isinstance(error, InvalidRequestError | ModelFileError | EngineStateError), error

    def act(self) -> None:
        rng = self.worker.rng
        name = rng.choice(sorted(self.paths))
        kind = rng.choice(["load", "load", "unload", "pin", "unpin", "find"])
        try:
            if kind == "load":
                args = {"name": name, "path": self.paths[name], "in_place": rng.random() < 0.5}
                value = self.call("load", args)
            elif kind in ("pin", "unpin"):
                value = self.call("pin", {"name": name, "pinned": kind == "pin"})
            else:
                value = self.call(kind, {"name": name})
        except ModelNotFoundError:
            self.refused += 1
            return
        if isinstance(value, Future):
            self.calls.append(value)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        fake_files(patch)
        yield folders(Path(tmp_path_factory.mktemp("adapters")), RANKS)


def adapted(world: World, paths, *, failures=0.0, churn=0.0, read_failures=0.0, host=None) -> World:
    rng = random.Random(world.rng.random())
    worker = ToyWorker(rng, rng.choice([0.3, 1.0]), read_failures)
    given = LoraSettings(
        lora_modules=tuple(f"{name}={path}" for name, path in paths.items()),
        max_loras=rng.choice([1, 2, 3, 8]),
        max_cpu_loras=host or rng.choice([1, 2, 8]),
    )
    driver = Driver(given, worker, paths)
    driver.churn = churn
    world = replace(world, rng=rng, faulty=world.faulty or churn > 0 or read_failures > 0, extra=(driver,))
    world.device.__class__ = LoraDevice
    world.device._mover = worker.mover(latency=rng.choice([0.3, 1.0]), failures=failures)
    world.scheduler.attach(worker.call)
    world.device.prepare(lambda slot: uid_in(world, driver, slot), worker)
    world.driver = driver
    return world


def uid_in(world, driver, slot):
    request = next(r for r in world.scheduler._requests.running if r.slot == slot)
    weights = driver._of.get(request)
    return weights and (weights.uid, driver._starts.get(request, 0), weights.changes_keys)


def with_adapters(rng, requests):
    kinds = [*RANKS, "a", ("a", 0.5), "called", "called too"]
    made = []
    for request in requests:
        if rng.random() < 0.25:
            made.append(request)
            continue
        several = [("a", 1.0), ("b", 0.5)] if rng.random() < 0.15 else [rng.choice(kinds)]
        tokens = list(request.tokens)
        for place in rng.choice([(), (1,), (2,), (1, 6)]):  # few, so that prompts have common prefixes behind them
            tokens[place : place + 2] = INVOCATION
        made.append(msgspec.structs.replace(request, tokens=tokens, options=option(*several)))
    return made


def settle(world: World) -> Driver:
    """All that was held is given back, and every call has its answer."""
    driver = world.driver
    driver.churn, driver.worker.latency, driver.worker.failures = 0.0, 1.0, 0.0
    world.device._mover.failures = 0.0
    patience = time.monotonic() + 60
    while world.loop.busy or driver.calls or driver.worker.pending or driver._leaving:
        assert time.monotonic() < patience
        world.take(world.loop.step() if world.loop.busy else world.loop.idle() or [])
        wait(driver.calls, 0.01)
    assert not driver.calls
    assert not driver._of
    assert not driver._since
    assert not driver._leaving
    world.scheduler.check_idle()
    residency = driver._residency
    for one in residency.everything:
        assert not one.requests
        assert (one.uid in driver.worker.host) == one.on_host
    assert driver.worker.host <= {one.uid for one in residency.everything}
    world.scheduler.park()
    assert not world.cache.leases
    assert sorted(residency._free) == list(range(driver._settings.most_on_device))
    for name in [one["name"] for one in driver.call("list", {})["adapters"]]:
        driver.call("unload", {"name": name}).result(0)
    assert residency.everything == []
    assert driver.worker.host == driver.worker.known == set()
    world.check()
    return driver


@given(worlds(LAYOUTS), st.integers(1, 14), st.sampled_from([0.0, 0.05]), st.sampled_from([0.0, 0.0, 0.1]))
@settings(max_examples=examples(150))
def test_any_life_of_an_engine_with_adapters(paths, world, count, abort_rate, failures):
    world = adapted(world, paths)
    world.device._mover.failures = failures
    world.faulty = world.may_fail = failures > 0
    world.run(with_adapters(world.rng, random_requests(world.rng, count)), abort_rate)
    settle(world)


@given(worlds(LAYOUTS), st.integers(2, 14), st.sampled_from([0.0, 0.3]))
@settings(max_examples=examples(120))
def test_names_come_and_go_while_requests_run(paths, world, count, read_failures):
    world = adapted(world, paths, churn=0.3, read_failures=read_failures)
    world.ask = asking_freely(world)
    world.run(with_adapters(world.rng, random_requests(world.rng, count)), 0.02)
    settle(world)


@given(worlds(LAYOUTS), st.integers(2, 12), st.integers(0, 2**32))
@settings(max_examples=examples(100))
def test_steps_that_fail_lose_no_adapter(paths, world, count, seed):
    world = adapted(replace(world, faulty=True), paths, churn=0.1)
    world.ask = asking_freely(world)
    world.device._fail_at = frozenset(random.Random(seed).sample(range(60), 5))
    world.run(with_adapters(world.rng, random_requests(world.rng, count)), 0.02)
    settle(world)


def asking_freely(world: World):
    """Names may be gone when a request arrives."""

    def ask(request):
        world.asked[request.id] = request
        try:
            world.loop.add(request)
        except InvalidRequestError:
            del world.asked[request.id]

    return ask


@pytest.mark.parametrize("depth", [0, 1])
def test_the_long_run_evicts_and_loads_again(paths, depth):
    world = World(
        rng=random.Random(depth), depth=depth, num_drafts=0, num_blocks=20, budget=16, policy="fcfs", share=True
    )
    world = adapted(world, paths, host=2)
    world.run(with_adapters(world.rng, random_requests(world.rng, 150)), abort_rate=0.01)
    stats = {one.name: one.values for one in world.scheduler.stats().features}
    driver = settle(world)
    assert stats["lora_loads"][""] > 20
    assert stats["lora_evictions"][""] > 20
    assert stats["lora_wait_seconds"][""] > 0
    assert stats["lora_tokens"]["a"] > 0
    assert world.scheduler.stats().num_preemptions > 0
    assert driver.worker.most_on_host <= 2


def test_a_thousand_loads_and_unloads_under_load(paths):
    """Every request has the adapter that its name meant when it arrived; nothing is left over."""
    world = World(rng=random.Random(1), depth=1, num_drafts=0, num_blocks=60, budget=16, policy="fcfs", share=True)
    world = adapted(world, paths, churn=1.0)
    driver = world.driver
    world.ask = asking_freely(world)
    rounds = 0
    while driver.answered + driver.refused < 1000:
        rounds += 1
        requests = with_adapters(world.rng, random_requests(world.rng, 12))
        world.run([msgspec.structs.replace(one, id=f"{rounds}/{one.id}") for one in requests], 0.0)
    settle(world)
    ends = [end.finish for end in world.reasons.values()]
    assert set(ends) == {FinishReason.STOP, FinishReason.LENGTH}
    assert driver.answered > 500
