"""Tiers on the toy device: whatever is stored, loaded, late, failing, aborted or preempted, tokens stay the same.

The device checks every cell that a row reads, and the mover that every page is stored under the name of its content.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from steps_kit import Engine
from test_faults_anywhere import WITHIN, Fault, faults
from test_leases import Keeper
from test_plan_codec import sent
from tier_kit import BLOCK, ChoosyShelf, Shelf, ShelfMover, name_of
from world_kit import LAYOUTS, STATE, World, random_requests, worlds

from octavo.cache.block_pool import BlockPool
from octavo.cache.cache import KVCache
from octavo.core.cache_groups import FULL
from octavo.core.output import FinishReason, Moved, StepOutput, TransferState
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.plan import PlanDraft, Transfer, Transfers
from octavo.engine.executor import FixedWorker
from octavo.engine.loop import EngineLoop
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.toy import ToyDevice, ToyStep, toy_generate
from octavo.schedule.scheduler import Scheduler


class Travelling(ToyDevice):
    """Is given what was bytes in between."""

    def forward(self, plan):
        found = PlanCodec({}).decode_plan(PlanCodec({}).encode_plan(plan))
        assert found == plan
        return super().forward(found)

    def _sample(self, step: ToyStep):
        super()._sample(step)
        step.output = sent(step.output)


def shelved(world: World, shelves: int = 1, kind: type[Shelf] = Shelf, **mover) -> World:
    """The world with tiers."""
    rng = random.Random(world.rng.random())
    late = [0.0 if rng.random() < 0.2 else 1e9 for _ in range(shelves)]
    extra = (*world.extra, *(kind(f"shelf {i}", late[i]) for i in range(shelves)))
    world = replace(world, share=True, extra=extra, rng=rng)
    world.device._mover = ShelfMover(rng, world.groups, latency=rng.choice([0.1, 0.5, 1.0]), **mover)
    world.device.__class__ = Travelling
    return world


def settle(world: World) -> None:
    """Nothing is held at the end, and what the engine believes to be stored is stored."""
    world.check()
    world.scheduler.check_idle()
    assert world.cache.leases == {}
    tiers, mover = world.scheduler._tiers, world.device._mover
    books = ("_loads", "_arriving", "_arrived", "_waiting", "_given_up", "_unsent")
    books += ("_filling", "_filled", "_ready", "_unread", "_names")
    assert {name: getattr(tiers, name) for name in books if getattr(tiers, name)} == {}
    assert all(not work.loads for work in mover.work.values())
    for hook in world.extra:
        if isinstance(hook, Shelf):
            assert {(hook.name, page) for page in hook.tier.index} <= mover.pages.keys()


@given(worlds(LAYOUTS), st.integers(1, 2), st.integers(1, 12), st.sampled_from([0.0, 0.05]), st.floats(0, 0.3))
@settings(max_examples=examples(400))
def test_any_life_of_an_engine_with_tiers(world, shelves, count, abort_rate, failures):
    world = shelved(world, shelves, failures=failures if world.rng.random() < 0.5 else 0.0)
    requests = random_requests(world.rng, count)
    world.run(requests[: count // 2], abort_rate)
    if world.rng.random() < 0.5:
        world.loop.reset_prefix_cache()
    world.run(requests[count // 2 :], abort_rate)
    settle(world)


@given(worlds(LAYOUTS), st.integers(1, 12), st.floats(0, 0.3), st.floats(0, 1))
@settings(max_examples=examples(300))
def test_tiers_that_store_what_some_requests_compute_and_share(world, count, failures, share):
    world = shelved(world, 2, ChoosyShelf, failures=failures)
    requests = random_requests(world.rng, count)
    choices = [{f"shelf {i}": msgspec.Raw(b"\xc0") for i in (0, 1) if world.rng.random() < share} for _ in requests]
    requests = [msgspec.structs.replace(one, options=chosen) for one, chosen in zip(requests, choices, strict=True)]
    world.run(requests, 0.02)
    settle(world)


@given(worlds(LAYOUTS), st.integers(2, 12), st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_steps_that_fail_store_nothing_and_lose_no_block(world, count, seed):
    """At any launch, with transfers on their way, and with leases of others."""
    world = replace(world, faulty=True, extra=(Keeper(world.rng),))
    world.extra[0].device = world.device
    world = shelved(world, failures=0.1)
    world.extra[0].device = world.device
    world.device._fail_at = frozenset(random.Random(seed).sample(range(60), 5))
    world.run(random_requests(world.rng, count), 0.02)
    world.extra[0].close()
    settle(world)


@given(worlds(), st.integers(2, 12))
@settings(max_examples=examples(200))
def test_what_a_poisoned_step_wrote_is_not_stored(world, count):
    world = shelved(replace(world, num_drafts=0, poison=7))
    world.run(random_requests(world.rng, count), 0.0)
    settle(world)


def live_with(fault: Fault, world: World, count: int, within: str) -> None:
    """A life with tiers, leases of others and this fault."""
    world = replace(world, faulty=True, extra=(Keeper(world.rng),))
    world = shelved(world, failures=0.1)
    world.extra[0].device = world.device
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.within(patch, Scheduler, within)
        world.run(random_requests(world.rng, count), 0.02)
    world.extra[0].close()
    settle(world)
    assert sum(end.finish is FinishReason.ERROR for end in world.reasons.values()) <= 1


@given(worlds(LAYOUTS), faults(WITHIN), st.integers(1, 12), st.sampled_from(["commit", "plan"]))
@settings(max_examples=examples(300))
def test_a_failure_of_any_function_of_the_scheduler_harms_one_request(world, fault, count, within):
    live_with(fault, world, count, within)


@pytest.mark.parametrize("count", [4, 12])
@pytest.mark.parametrize(
    ("owner", "name", "at", "after", "within"),
    [
        (BlockPool, "hold", 1, True, "commit"),
        (BlockPool, "hold", 1, False, "commit"),
        (KVCache, "lease", 0, True, "commit"),
        (BlockPool, "drop", 1, True, "plan"),
        (BlockPool, "drop", 1, False, "plan"),
    ],
)
def test_no_block_is_lost_with_a_lease_that_fails_inside_a_feature(owner, name, at, after, within, count):
    """Found by the test above: blocks leaked, or were missing to requests that then waited forever."""
    world = World(random.Random(0), depth=0, num_drafts=0, num_blocks=9, budget=6, policy="fcfs", share=False)
    live_with(Fault(owner, name, at, after=after), world, count, within)


@pytest.mark.parametrize(("depth", "seed"), [(0, 1), (1, 2), (2, 1)])
def test_a_request_whose_states_are_half_settled_ends_alone(depth, seed):
    """Found likewise: its end released a block twice, the step failed, and another request was blamed."""
    world = World(
        random.Random(seed),
        depth,
        num_drafts=7,
        num_blocks=9,
        budget=64,
        policy="longest-first",
        share=True,
        right_drafts=0.9,
        groups=(STATE,),
    )
    live_with(Fault(BlockPool, "drop", seed, after=True), world, 2, "commit")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_long_run_really_loads(depth):
    """Tight memory, preemptions, evictions; what was computed once comes back from the tier."""
    world = World(
        rng=random.Random(depth), depth=depth, num_drafts=0, num_blocks=18, budget=16, policy="fcfs", share=True
    )
    world = shelved(world)
    world.run(random_requests(world.rng, 200), abort_rate=0.01)
    settle(world)
    stats = world.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.blocks_evicted > 0
    assert stats.blocks_stored > 0
    assert stats.blocks_loaded > 0


def engine(depth=0, *, mover=None, shelf=None, hooks=(), **device):
    mover = mover or ShelfMover(random.Random(0), FULL, latency=1.0)
    shelf = shelf or Shelf()
    made = Engine(ToyDevice(64, BLOCK, mover=mover, **device), depth, [shelf, *hooks])
    made.mover, made.shelf = mover, shelf
    return made


PROMPT = [7] * 21


def warm(depth=0, **how):
    """An engine whose tier has the prompt's blocks and whose cache has not."""
    made = engine(depth, **how)
    made.ask("first", PROMPT, max_tokens=1)
    made.run()
    made.loop.idle()
    made.loop.reset_prefix_cache()
    return made


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_prefix_comes_back_and_only_the_rest_is_computed(depth):
    made = warm(depth)
    assert made.shelf.tier.index == {name_of(PROMPT[:end], 0) for end in (4, 8, 12, 16, 20)}
    before = made.scheduler.stats().step_tokens
    made.ask("again", PROMPT, max_tokens=1)
    ends = made.run().ends()
    assert ends["again", 0].num_cached == 20
    assert made.scheduler.stats().step_tokens - before == 1
    assert made.scheduler.stats().blocks_loaded == 5
    assert made.outputs("again") == {0: toy_generate(PROMPT, 1, stop_ids=())}


def test_a_reset_forgets_what_is_being_stored():
    made = engine()
    made.mover.latency = 0.0
    made.ask("first", PROMPT, max_tokens=4)
    while not made.ends():
        made.deltas += made.loop.step()
    assert made.scheduler.storing
    made.loop.reset_prefix_cache()
    made.mover.latency = 1.0
    while made.scheduler.storing:
        made.loop.idle()
    assert made.shelf.tier.index == set()
    assert made.scheduler.stats().blocks_not_stored == 6
    made.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_tier_can_store_what_a_request_shares(depth):
    """Nothing of the first request is stored; the second one finds its blocks, and they are stored for it."""
    made = engine(depth, shelf=ChoosyShelf())
    made.ask("first", PROMPT, max_tokens=1)
    made.run()
    assert made.scheduler.stats().blocks_stored == 0
    made.ask("second", [*PROMPT, 8, 8, 8], options={"shelf": msgspec.Raw(b"\xc0")}, max_tokens=1)
    made.run()
    made.loop.idle()
    assert made.ends()["second", 0].num_cached == 20
    whole = [*PROMPT, 8, 8, 8]
    assert made.shelf.tier.index == {name_of(whole[:end], 0) for end in (4, 8, 12, 16, 20, 24)}


def test_a_tier_stores_what_is_still_being_computed_when_it_is_shared():
    """Both requests come at once: the second shares blocks of a step in flight."""
    made = engine(1, shelf=ChoosyShelf())
    made.ask("first", PROMPT, max_tokens=4)
    made.deltas += made.loop.step()
    made.ask("second", [*PROMPT, 8, 8, 8], options={"shelf": msgspec.Raw(b"\xc0")}, max_tokens=1)
    made.run()
    made.loop.idle()
    assert len(made.shelf.tier.index) == 6


def test_two_requests_load_a_prefix_once_and_others_pass_them():
    made = warm(mover=ShelfMover(random.Random(0), FULL, latency=1.0))
    made.mover.latency = 0.0
    made.ask("a", PROMPT)
    made.ask("b", PROMPT)
    made.ask("other", [8] * 5)
    for _ in range(12):
        made.deltas += made.loop.step()
    assert made.outputs("other") == {0: toy_generate([8] * 5, 8, stop_ids=())}
    assert made.outputs("a") == made.outputs("b") == {}
    assert made.scheduler.stats().num_waiting_deferred == 2
    assert made.loop.starved
    assert made.loop.busy
    made.mover.latency = 1.0
    ends = made.run().ends()
    assert [len(load.pages) for load in made.mover.begun] == [5]
    assert ends["a", 0].num_cached == ends["b", 0].num_cached == 20


def test_a_load_that_fails_is_computed_and_not_tried_again():
    made = warm()
    made.mover.failures = 1.0
    made.ask("again", PROMPT)
    ends = made.run().ends()
    assert ends["again", 0].num_cached == 0
    assert made.outputs("again") == {0: toy_generate(PROMPT, 8, stop_ids=())}
    assert len(made.mover.begun) == 1
    assert made.scheduler.stats().loads_failed == 1
    assert not made.shelf.tier.index & {name_of(PROMPT[:4], 0)}


def test_a_late_load_is_not_waited_for_and_writes_to_no_block_that_is_used():
    made = warm(shelf=Shelf(deadline_s=0.0))
    made.mover.latency = 0.0
    made.ask("again", PROMPT)
    while not made.outputs("again"):
        made.deltas += made.loop.step()
    assert made.scheduler.stats().loads_late == 1
    assert made.scheduler.stats().num_blocks_leased == 5
    made.mover.latency = 1.0
    ends = made.run().ends()
    assert ends["again", 0].num_cached == 0
    assert made.outputs("again") == {0: toy_generate(PROMPT, 8, stop_ids=())}
    made.ask("third", PROMPT)
    assert made.run().ends()["third", 0].num_cached == 20


def test_a_request_that_is_aborted_while_it_loads_leaves_its_blocks_to_the_load():
    made = warm()
    made.mover.latency = 0.0
    made.ask("again", PROMPT)
    made.loop.step()
    made.loop.abort("again")
    assert made.loop.busy
    assert [len(list(lease.held)) for lease in made.scheduler.cache.leases] == [5]
    made.mover.latency = 1.0
    made.run()
    assert made.scheduler.cache.num_free == 64
    made.ask("third", PROMPT)
    assert made.run().ends()["third", 0].num_cached == 20
    assert len(made.mover.begun) == 1


def test_a_prefix_of_a_failed_step_is_not_found_with_what_was_loaded_behind_it():
    """A load goes on from blocks that the same step was to compute."""
    made = warm(poison=13)
    made.shelf.tier.index -= {name_of(PROMPT[:end], 0) for end in (4, 8)}
    made.mover.latency = 0.0
    made.ask("guilty", [*PROMPT[:8], 13])
    made.ask("waiting", PROMPT)
    made.deltas += made.loop.step()
    assert [len(load.blocks) for load in made.mover.begun] == [3]
    made.loop.abort("waiting")
    made.mover.latency = 1.0
    ends = made.run().ends()
    assert ends["guilty", 0].finish is FinishReason.ERROR
    made.ask("third", PROMPT)
    assert made.run().ends()["third", 0].num_cached == 0
    assert made.outputs("third") == {0: toy_generate(PROMPT, 8, stop_ids=())}


def test_a_pause_comes_to_rest_when_transfers_have_ended():
    made = warm()
    made.mover.latency = 0.0
    made.ask("again", PROMPT)
    made.loop.step()
    made.loop.pause(PauseMode.KEEP)
    assert not made.loop.settled
    made.loop.step()
    made.mover.latency = 1.0
    while not made.loop.settled:
        made.loop.step()
    assert made.scheduler.lessees() == []
    made.loop.resume()
    assert made.run().ends()["again", 0].num_cached == 20


class Bed(FixedWorker):
    """Comes back from a sleep with an empty KV cache."""

    can_sleep = True

    def __init__(self, mover):
        self.mover = mover

    def sleep(self, level):
        """Nothing is to be freed."""

    def wake_up(self, part):
        """Likewise."""

    def executor(self):
        return ToyDevice(64, BLOCK, mover=self.mover)


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_sleep_has_emptied_is_not_stored(depth, steps):
    """Blocks that become full with the last step before it; then all that was stored is loaded again."""
    made = engine(depth)
    made.mover.latency = 0.5
    made.scheduler.recover = None  # else it would hide what is wrong
    made.loop = EngineLoop(made.scheduler, made.loop._executor, depth, worker=Bed(made.mover))
    made.ask("asleep", PROMPT)
    for _ in range(steps):
        made.deltas += made.loop.step()
    made.loop.pause(PauseMode.KEEP)
    while not made.loop.settled:
        made.deltas += made.loop.step()
    made.loop.sleep(1)
    made.loop.idle()
    made.loop.wake_up(list(SleepTag))
    made.run()
    assert made.outputs("asleep") == {0: toy_generate(PROMPT, 8, stop_ids=())}


def test_a_tier_that_raises_is_as_if_it_held_nothing(caplog):
    made = warm()

    def fails(page):
        raise KeyError("an index")

    made.shelf.tier.holds = fails
    made.ask("again", PROMPT)
    ends = made.run().ends()
    assert ends["again", 0].num_cached == 0
    assert made.outputs("again") == {0: toy_generate(PROMPT, 8, stop_ids=())}
    assert "the tier 'shelf' failed to answer 'lacks'" in caplog.text


def test_stores_on_their_way_hold_a_part_of_the_cache_at_most():
    made = engine()
    made.mover.latency = 0.0
    for i in range(4):
        made.ask(f"r{i}", [i + 1] * 40, max_tokens=1)
    for _ in range(30):
        made.deltas += made.loop.step()
    stats = made.loop.stats()
    assert stats.num_blocks_leased == 32
    assert stats.blocks_not_stored == 8
    made.mover.latency = 1.0
    made.run()


def test_without_tiers_plans_have_no_transfers():
    seen = []

    class Watching(ToyDevice):
        def forward(self, plan):
            seen.append(plan)
            return super().forward(plan)

    made = Engine(Watching(64, BLOCK), 1)
    made.ask("a", PROMPT)
    made.run()
    assert all(plan.transfers is None and plan.slots for plan in seen)
    assert made.scheduler._tiers is None


def test_transfers_travel():
    codec = PlanCodec({})
    transfers = Transfers(
        [Transfer(1, "shelf", [b"\x00\xff" * 17], [3])], [Transfer(2, "x", [b"a", b"b"], [4, 5])], [0]
    )
    plan = PlanDraft(transfers=transfers).freeze(3)
    assert codec.decode_plan(codec.encode_plan(plan)) == plan
    output = StepOutput([], moved=[Moved(1, TransferState.ENDED, [0]), Moved(2, TransferState.READ)])
    assert sent(output) == output
