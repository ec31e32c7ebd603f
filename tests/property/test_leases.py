"""Leases: blocks that a feature keeps beyond the requests that computed them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps_kit import BLOCK, Engine
from test_faults_anywhere import Fault
from world_kit import LAYOUTS, random_requests, worlds

from octavo.cache.block_pool import BlockPool
from octavo.cache.cache import KVCache
from octavo.cache.table import BlockTable
from octavo.core.cache_groups import NO_BLOCK, GroupKind
from octavo.core.errors import EngineStateError
from octavo.core.output import FinishReason
from octavo.core.pausing import PauseMode
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice, toy_generate
from octavo.schedule.hooks import EngineHook
from octavo.schedule.scheduler import Scheduler


class Keeper(EngineHook):
    """Leases the blocks of some requests, a few at a time, and releases them at random moments.

    What it holds must be what the request computed for as long as it holds it.
    """

    name = "keeper"

    def __init__(self, rng, most=2):
        self.rng = rng
        self.most = most
        self.held = []
        self.ended = []
        self.count = 0
        self.device = None

    def on_finish(self, request, lease):
        assert request.finish not in (None, FinishReason.ERROR)
        assert not request.inflight
        if len(self.held) < self.most and self.rng.random() < 0.5:
            self.held.append((lease(), list(request.tokens)))
            self.count += 1

    def turn(self):
        for one in list(self.held):
            self.check(*one)
            if self.rng.random() < 0.2:
                self.held.remove(one)
                self.ended.append(one[0])
        self.release()

    def release(self):
        """Give back what has ended, and what could not be given back before."""
        while self.ended:
            self.ended[-1].release()
            self.ended.pop()

    def close(self):
        """Give everything back."""
        self.ended += [lease for lease, _ in self.held]
        self.held = []
        self.release()

    def check(self, lease, tokens):
        groups = self.device._groups
        for group, row in zip(groups, lease.groups, strict=True):
            if group.kind is GroupKind.STATE:
                assert not row or self.device._cells[row[0]][0] == tuple(tokens[: lease.num_tokens])
                continue
            for position in range(group.first_read(lease.num_tokens), lease.num_tokens):
                found = self.device._cells[row[position // BLOCK]][position % BLOCK]
                assert found == tuple(tokens[: position + 1])


def keeping(world):
    world = replace(world, extra=(Keeper(world.rng),), rng=random.Random(world.rng.random()))
    world.extra[0].device = world.device
    return world


@given(worlds(LAYOUTS), st.integers(1, 12), st.sampled_from([0.0, 0.05]), st.booleans())
@settings(max_examples=200)
def test_leases_change_no_token_and_keep_what_they_hold(world, count, abort_rate, fails):
    world = keeping(replace(world, faulty=fails))
    if fails:
        world.device._fail_at = frozenset(world.rng.sample(range(40), 3))
    world.run(random_requests(world.rng, count), abort_rate)
    keeper = world.extra[0]
    assert list(world.cache.leases) == [lease for lease, _ in keeper.held]
    world.scheduler.check_idle()
    for lease, tokens in keeper.held:
        keeper.check(lease, tokens)
        lease.release()
        lease.release()
    assert world.cache.leases == {}
    world.check()


class Heir(EngineHook):
    """Leases the blocks of "kept", and fails where it is told to."""

    name = "heir"

    def __init__(self, fails=False):
        self.fails = fails
        self.leases = []

    def on_finish(self, request, lease):
        if request.id == "kept":
            self.leases.append(lease())
            if self.fails:
                raise KeyError("a peer")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_blocks_stay_until_their_release(depth):
    """They are still found after everything else was evicted, and are free afterwards."""
    heir, prompt = Heir(), [7] * 21
    engine = Engine(ToyDevice(64, BLOCK), depth, [heir])
    engine.ask("kept", prompt)
    engine.run()
    (lease,) = heir.leases
    assert lease.owner == "heir"
    assert lease.num_tokens >= 28
    assert engine.loop.stats().num_blocks_leased == engine.loop.stats().num_blocks_used == 7
    for i in range(10):
        engine.ask(f"pressure {i}", [i + 8] * 30, max_tokens=30)
    engine.run()
    assert engine.loop.stats().blocks_evicted > 0
    engine.ask("again", prompt)
    ends = engine.run().ends()
    assert ends["again", 0].num_cached == 20
    assert engine.outputs("again") == {0: toy_generate(prompt, 8, stop_ids=())}
    lease.release()
    assert engine.loop.stats().num_blocks_used == 0
    assert engine.scheduler.cache.leases == {}
    engine.scheduler.check_idle()


def test_a_feature_that_fails_at_the_end_of_a_request_keeps_nothing(caplog):
    heir = Heir(fails=True)
    engine = Engine(ToyDevice(64, BLOCK), 1, [heir])
    engine.ask("kept", [7] * 21)
    ends = engine.run().ends()
    assert ends["kept", 0].finish is FinishReason.LENGTH
    assert engine.scheduler.cache.leases == {}
    assert "'heir' failed at the end of request kept" in caplog.text


class Leaver(Heir):
    """Releases its leases in the next turn."""

    def turn(self):
        while self.leases:
            self.leases.pop().release()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("name", "within"), [("hold", "commit"), ("drop", "turn")])
@pytest.mark.parametrize("after", [False, True])
def test_a_lease_that_fails_halfway_inside_a_feature_harms_nobody(monkeypatch, depth, name, within, after):
    """The third block of a lease; a request that needs all blocks runs afterwards."""
    engine = Engine(ToyDevice(64, BLOCK), depth, [Leaver()])
    fault = Fault(BlockPool, name, 2, after=after)
    fault.install(monkeypatch)
    fault.within(monkeypatch, Scheduler, within)
    engine.ask("other", [8] * 9, max_tokens=30)
    engine.ask("kept", [7] * 21)
    ends = engine.run().ends()
    assert fault.left < 0
    assert {end.finish for end in ends.values()} == {FinishReason.LENGTH}
    assert engine.outputs("other") == {0: toy_generate([8] * 9, 30, stop_ids=())}
    assert engine.outputs("kept") == {0: toy_generate([7] * 21, 8, stop_ids=())}
    engine.loop.idle()
    assert engine.scheduler.cache.leases == {}
    assert engine.scheduler.cache.num_free == 64
    engine.ask("large", [9] * 240)
    assert engine.run().outputs("large") == {0: toy_generate([9] * 240, 8, stop_ids=())}


def test_an_idle_engine_counts_its_blocks_again_after_a_release_that_failed(monkeypatch):
    heir = Heir()
    engine = Engine(ToyDevice(64, BLOCK), 0, [heir])
    engine.ask("kept", [7] * 21)
    engine.run()
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "drop", None)
        with pytest.raises(TypeError):
            heir.leases[0].release()
    assert engine.scheduler.cache.num_free == 57
    engine.loop.idle()
    assert engine.scheduler.cache.num_free == 64
    heir.leases[0].release()
    engine.scheduler.check_idle()


def test_who_lacks_leased_blocks_waits_for_them():
    """Nothing else runs, and the engine does not take it for stuck."""
    heir = Heir()
    engine = Engine(ToyDevice(64, BLOCK), 1, [heir])
    engine.ask("kept", [7] * 100)
    engine.run()
    engine.ask("large", [8] * 200)
    for _ in range(5):
        assert engine.loop.step() == []
        assert engine.loop.busy
        assert engine.loop.starved
    heir.leases[0].release()
    engine.run()
    assert engine.outputs("large") == {0: toy_generate([8] * 200, 8, stop_ids=())}


class Sleeper:
    weight_version, kv_form, can_sleep = "default", "", True

    def sleep(self, level):
        """Its memory is nobody's business."""


def test_an_engine_with_leases_does_not_sleep():
    heir = Heir()
    engine = Engine(ToyDevice(64, BLOCK), 0, [heir])
    loop = engine.loop = EngineLoop(engine.scheduler, ToyDevice(64, BLOCK), worker=Sleeper())
    engine.ask("kept", [7] * 21)
    engine.run()
    loop.pause(PauseMode.WAIT)
    with pytest.raises(EngineStateError, match="KV blocks are leased by heir and would be lost"):
        loop.sleep(1)
    heir.leases[0].release()
    loop.sleep(1)
    assert loop.stats().sleep_level == 1


def test_a_cache_tells_of_blocks_that_no_lease_explains():
    cache, table = KVCache(8, BLOCK), BlockTable()
    cache.grow(table, 0, 10)
    lease = cache.lease(table, "somebody", 10)
    assert list(lease.held) == table.blocks
    assert NO_BLOCK not in table.blocks
    assert cache.num_leased == 0  # the table holds them, too
    with pytest.raises(AssertionError, match="3 blocks and 0 requests are left"):
        cache.check_empty(0)
    cache.release(table)
    assert cache.num_leased == 3
    cache.check_empty(0)
    cache.recount([])
    assert cache.pool.num_used == 3
    lease.release()
    assert cache.num_free == 8
