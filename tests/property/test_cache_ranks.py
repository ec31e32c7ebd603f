"""Ranks with KV blocks of their own: all blocks of a request are on one, whatever the engine's life."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import BLOCK, FULL, LAYOUTS, World, random_requests, worlds

from octavo.cache.cache import KVCache
from octavo.cache.table import BlockTable
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest


def bounded(world: World) -> World:
    """Check each plan of the world: no rank has more tokens than the budget of one."""
    forward, rank_of = world.device.forward, {}

    def checked(plan):
        rank_of.update((row.slot, row.rank) for row in plan.new)
        of_ranks = Counter()
        for slot, num_tokens in zip(plan.slots, plan.num_tokens, strict=True):
            of_ranks[rank_of[slot]] += num_tokens
        world.most = max(world.most, sum(of_ranks.values()))
        assert max(of_ranks.values()) <= world.budget
        return forward(plan)

    world.device.forward, world.most = checked, 0
    return world


@given(worlds(LAYOUTS), st.integers(2, 3), st.integers(1, 12), st.sampled_from([0.0, 0.05]))
@settings(max_examples=examples(600), deadline=None)
def test_any_life_of_an_engine(world, ranks, count, abort_rate):
    per_rank = world.num_blocks // len(world.groups)
    world = bounded(replace(world, ranks=ranks, num_blocks=per_rank, rng=random.Random(world.rng.random())))
    world.run(random_requests(world.rng, count), abort_rate)
    world.check()


@pytest.mark.parametrize("depth", [0, 1])
def test_hundreds_of_requests(depth):
    """Tight memory on each rank: what is preempted is on the rank that lacks blocks, and prefixes are found."""
    world = World(
        rng=random.Random(depth), depth=depth, num_drafts=0, num_blocks=9, budget=16, policy="fcfs", share=True, ranks=2
    )
    bounded(world).run(random_requests(world.rng, 200), abort_rate=0.01)
    world.check()
    assert world.most > world.budget, "only one rank computes in each step"
    stats = world.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert stats.blocks_copied > 0


def seated(cache: KVCache, keys: list[int]) -> BlockTable:
    table = BlockTable()
    cache.seat(table, "", keys, len(keys) + 1)
    found = cache.match(table, "", keys)
    assert cache.grow(table, found, len(keys)) is not None
    cache.register(table, "", keys, len(keys))
    return table


def test_a_request_goes_where_its_prefix_is_or_where_least_is_held():
    cache = KVCache(24, BLOCK, FULL, ranks=2)
    long, short = list(range(1, 25)), [0] * 8
    first, second = seated(cache, long), seated(cache, short)
    assert {first.rank, second.rank} == {0, 1}
    assert seated(cache, [9] * 4).rank == second.rank  # two blocks are held there, six on the other
    again = seated(cache, long)
    assert again.rank == first.rank  # five of its six blocks are there
    assert again.blocks[:5] == first.blocks[:5]
    full = seated(cache, [7] * 32)
    assert full.rank == second.rank  # only there is room
    assert cache.free_for(full) == cache.least_free
    cache.release(full)
    cache.check()


def test_who_waits_for_the_budget_of_a_rank_is_told_so():
    """Prompts with a prefix that one rank has go there, until its part of the step is full."""
    world = World(
        rng=random.Random(1), depth=0, num_drafts=0, num_blocks=30, budget=16, policy="fcfs", share=True, ranks=2
    )
    prefix = list(range(8, 20))
    known = GenerateRequest(id="known", tokens=[*prefix, 1], params=SamplingParams(max_tokens=1))
    world.loop.add(known)
    while world.loop.busy:
        world.loop.step()
    for i in range(3):
        tokens = [*prefix, *range(20 + 9 * i, 29 + 9 * i)]
        world.loop.add(GenerateRequest(id=f"{i}", tokens=tokens, params=SamplingParams(max_tokens=4)))
    world.loop.step()
    waits = world.scheduler.stats()
    assert (waits.num_waiting, waits.waits_for) == (1, "step_tokens")
