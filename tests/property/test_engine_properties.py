"""The real scheduler and loop on the toy device: whatever arrives, is aborted, or finds no room.

Each example is a whole life of an engine. Outputs must equal the sequential reference, no block may leak, nothing may
wait for ever, and every choice of every request must end exactly once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import BLOCK, LAYOUTS, MAX_LEN, World, random_requests, worlds

from octavo.cache.cache import KVCache
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import EOS, VOCAB, ToyDevice, toy_generate
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler


@given(worlds(), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=examples(1000), deadline=None)
def test_any_life_of_an_engine(world, count, abort_rate):
    world.run(random_requests(world.rng, count), abort_rate)
    world.check()


@given(worlds(), st.integers(1, 12), st.sampled_from([0.0, 0.05]))
@settings(max_examples=examples(200), deadline=None)
def test_any_life_with_stop_strings_and_drafts(world, count, abort_rate):
    """A client ends choices by what they say, while drafts of more tokens are accepted or in flight."""
    stops = tuple(tuple(world.rng.randrange(1, VOCAB) for _ in range(size)) for size in (1, 1, 1, 2))
    world = replace(world, num_drafts=world.rng.randint(1, 7), stops=stops, rng=random.Random(world.rng.random()))
    world.run(random_requests(world.rng, count), abort_rate)
    world.check()


@given(worlds(LAYOUTS[1:]), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=examples(1000), deadline=None)
def test_any_life_of_an_engine_whose_layers_keep_different_things(world, count, abort_rate):
    """Windows, states and full attention in one model, over one pool of blocks."""
    world.run(random_requests(world.rng, count), abort_rate)
    world.check()


@pytest.mark.parametrize("seed", [5100])
def test_a_block_is_not_copied_in_the_step_that_writes_it(seed):
    """Rare: choices follow a leader that comes back and finds its prompt where the same step has yet to write it."""
    rng = random.Random(seed)
    world = World(rng=rng, depth=rng.randrange(3), num_drafts=0, num_blocks=14, budget=16, policy="fcfs", share=True)
    world.run(random_requests(world.rng, 12), 0.0)
    world.check()


@pytest.mark.parametrize("seed", [3206, 6089, 1005500, 1006151, 1011354])
def test_who_is_preempted_and_comes_back_in_one_step_has_one_row_there(seed):
    """Rare: it takes several victims at once, of which the one that was next in the step finds room again."""
    rng = random.Random(seed)
    num_drafts = rng.choice([0, 0, 1, 3])
    world = World(
        rng=rng,
        depth=rng.randrange(3),
        num_drafts=num_drafts,
        num_blocks=rng.choice([14, 14, 14, 9, 20]),
        budget=rng.choice([6, 9, 16, 64]),
        policy=rng.choice(["fcfs", "longest-first", "priority", "shortest-first"]),
        share=True,
    )
    world.run(random_requests(world.rng, 12), 0.0)
    world.check()


@given(worlds(), st.integers(2, 12), st.sampled_from([0.0, 0.05]))
@settings(max_examples=examples(300), deadline=None)
def test_a_failing_request_harms_no_other(world, count, abort_rate):
    """Some requests have, or generate, a token that no step can compute. They alone end, at that token."""
    world = replace(world, num_drafts=0, poison=7, rng=random.Random(world.rng.random()))
    requests = random_requests(world.rng, count)
    world.run(requests, abort_rate)
    world.check()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_thousand_requests(depth):
    """The long run: 1,000 requests over three engines, tight memory, aborts, drafts, preemptions that really happen."""
    world = World(
        rng=random.Random(depth), depth=depth, num_drafts=3 * depth, num_blocks=18, budget=16, policy="fcfs", share=True
    )
    world.run(random_requests(world.rng, 334), abort_rate=0.01)
    world.check()
    stats = world.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert stats.blocks_copied > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stop_strings_are_found_within_drafts(depth):
    world = World(
        rng=random.Random(depth), depth=depth, num_drafts=7, num_blocks=18, budget=64, policy="fcfs", share=True,
        right_drafts=0.9, stops=((7,), (9,), (11,), (13, 5)),
    )  # fmt: skip
    world.run(random_requests(world.rng, 200), abort_rate=0.0)
    world.check()
    assert len(world.stopped) > 20
    assert world.scheduler.stats().num_preemptions > 0


@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(1, 3))
@settings(max_examples=examples(150), deadline=None)
def test_the_urgent_go_first_and_each_displaces_one(seed, depth, slots):
    """With slots the only bound. Who displaces is admitted, so that preemptions are bounded by arrivals: no thrash."""
    rng = random.Random(seed)
    limits = Limits(max_num_seqs=slots, max_num_batched_tokens=32, max_model_len=MAX_LEN, max_ahead=depth + 1)
    scheduler = Scheduler(KVCache(200, BLOCK), limits, make_policy("priority"), eos_token_ids=[EOS])
    loop = EngineLoop(scheduler, ToyDevice(200, BLOCK, seed=seed), depth)
    requests = [r for r in random_requests(rng, 12) if r.params.n == 1 and not r.prompt_only]
    arrivals, classes = list(requests), Counter(r.priority for r in requests)
    preemptions: Counter = Counter()
    outputs: dict[str, list[int]] = {r.id: [] for r in requests}
    while arrivals or loop.busy:
        if arrivals and rng.random() < 0.3:
            loop.add(arrivals.pop(0))
        for delta in loop.step():
            outputs[delta.id] += delta.tokens
            if delta.finish is not None:
                preemptions[next(r.priority for r in requests if r.id == delta.id)] += delta.num_preemptions
        first = scheduler._requests.waiting.peek()
        if (
            depth == 0
            and first is not None
            and scheduler._requests.running
            and len(scheduler._requests.running) == slots
        ):
            assert first.spec.priority >= scheduler._requests.running[-1].spec.priority
    for r in requests:
        stops = set(r.params.stop_token_ids or ()) | (set() if r.params.ignore_eos else {EOS})
        assert outputs[r.id] == toy_generate(r.tokens, r.params.max_tokens, stop_ids=stops, seed=r.params.seed)
    assert preemptions[0] == 0
    assert preemptions[1] <= classes[0]
    assert preemptions[2] <= 2 * classes[0] + classes[1]
    scheduler.check_idle()
