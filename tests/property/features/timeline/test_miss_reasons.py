"""Where the prefix cache missed, and why: as an oracle says that keeps every block that was ever cached."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import BLOCK, LAYOUTS, World, random_requests, worlds

from octavo.cache.prefix_tree import PrefixTree
from octavo.core.cache_groups import FULL
from octavo.features.timeline.engine import TimelineEngine
from octavo.features.timeline.story import Miss
from octavo.features.timeline.watch import Timeline


class Oracle(Timeline):
    """Compares each explanation with one that is found by looking at all paths that the tree has, or ever had."""

    def __init__(self, shares: bool) -> None:
        super().__init__(1000, shares_prefixes=shares)
        self.shares = shares
        self.there = set()
        self.left = {}
        self.compared = set()
        self.wrong = []

    def begin(self, cache, waits_for):
        super().begin(cache, waits_for)
        tree = cache.tree
        for name in ("insert", "remove", "clear"):
            setattr(tree, name, self.following(tree, getattr(tree, name), "dropped" if name == "clear" else "evicted"))

    def following(self, tree, method, reason):
        def call(*args):
            found = method(*args)
            now = set(paths(tree))
            self.left |= dict.fromkeys(self.there - now, reason)
            self.there = now
            return found

        return call

    def admitted(self, request):
        following = self._following[request]
        first = not following.story.admitted
        expected = self.expected(request) if first else None
        super().admitted(request)
        if expected is not None:
            found = following.story.misses
            told = [(miss.reason, miss.tokens, miss.position) for miss in found]
            if told != expected or sum(miss.tokens for miss in found) != request.num_prompt - request.num_computed:
                self.wrong.append((request, told, expected))  # the scheduler would swallow an error
            self.compared |= {miss.reason for miss in found}

    def expected(self, request):
        keys, found = tuple(request.tokens), request.num_computed
        rest, most = len(keys) - found, (len(keys) - 1) // BLOCK * BLOCK
        if request.index and rest == 1:
            return [("last_block", 1, found)]
        if not self.shares or not request.reads_cache:
            return [("not_read" if self.shares else "off", rest, found)]
        rank = request.table.rank
        own = request.namespace if rank < 0 else f"{rank}/{request.namespace}"
        reached = max((end for end in range(0, most + 1, BLOCK) if (own, keys[:end]) in self.there), default=0)
        parts = [("state", reached - found, found)] if reached > found else []
        end = reached
        while end < most and (reason := self.left.get((own, keys[: end + BLOCK]))) is not None:
            if end > reached and parts[-1][0] == reason:
                parts[-1] = (reason, parts[-1][1] + BLOCK, parts[-1][2])
            else:
                parts.append((reason, BLOCK, end))
            end += BLOCK
        others = {name for name, _ in self.there if name != own}
        depth = {
            name: max((at for at in range(0, most + 1, BLOCK) if (name, keys[:at]) in self.there), default=0)
            for name in others
        }
        best = max(depth.values(), default=0)
        if best > end:
            same = [name for name in depth if depth[name] == best and rank >= 0 and same_but_rank(name, own)]
            parts.append(("rank" if same else "namespace", best - end, end))
            end = best
        left = len(keys) - end
        if end == most:
            return [*parts, ("last_block", left, end)]
        if end > reached:
            return [*parts, ("new", left, end)]
        after = [path for name, path in self.there if name == own and path[:end] == keys[:end] and len(path) > end]
        common = max((common_length(path, keys) for path in after), default=0)
        if not after or not common:
            return [*parts, ("new", left, end)]
        return [*parts, ("diverged", left, common)]


def same_but_rank(name, own):
    return name.partition("/")[2] == own.partition("/")[2]


def common_length(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def paths(tree: PrefixTree):
    """Yield (namespace, tokens) of every node."""
    stack = [(root, ()) for root in tree.newest_roots]
    while stack:
        node, before = stack.pop()
        assert not node.dead
        for child in node.children.values():
            tokens = before + child.chunk
            yield child.namespace, tokens
            stack.append((child, tokens))


def watched(world: World, seed: int) -> tuple[World, Oracle]:
    oracle = Oracle(world.share)
    world = replace(world, extra=(TimelineEngine(oracle),), rng=random.Random(seed))
    return world, oracle


def in_namespaces(rng: random.Random, count: int):
    """Few tokens, so that prompts have more than their beginning in common."""
    for request in random_requests(rng, count):
        tokens = [1 + token % 3 for token in request.tokens] if rng.random() < 0.5 else request.tokens
        yield msgspec.structs.replace(request, namespace=rng.choice(["", "", "a"]), tokens=tokens)


def check(world: World, oracle: Oracle) -> None:
    world.check()
    assert oracle.wrong == []
    assert world.scheduler.counters.watchers._watchers == [oracle], "it has failed"
    assert not oracle._following, "a request was forgotten"
    assert not oracle._held
    assert sum(oracle.missed.values()) == world.scheduler.counters.stats.prompt_tokens_computed
    assert all(waited >= 0 for story in oracle._ended for waited in story.waits.values())
    stats = world.scheduler.counters.stats
    assert sum(story.num_preemptions for story in oracle._ended) == stats.num_preemptions
    lost = sum(one.recomputed for story in oracle._ended for one in story.preemptions)
    assert lost == stats.recomputed_tokens


@given(worlds(LAYOUTS), st.integers(0, 2**32), st.integers(1, 24), st.sampled_from([0.0, 0.05]), st.booleans())
@settings(max_examples=examples(240))
def test_every_miss_has_the_reason_that_an_oracle_finds(world, seed, count, abort_rate, fails):
    world, oracle = watched(replace(world, faulty=fails), seed)
    if fails:
        world.device._fail_at = frozenset(world.rng.sample(range(40), 3))
    requests = list(in_namespaces(world.rng, count))
    world.run(requests[: count // 2], abort_rate)
    if seed % 4 == 0:
        world.loop.reset_prefix_cache()
    world.run(requests[count // 2 :], abort_rate)
    check(world, oracle)


@given(worlds([FULL]), st.integers(0, 2**32), st.integers(1, 24))
@settings(max_examples=examples(200))
def test_blocks_of_other_ranks_are_told_from_those_of_other_tenants(world, seed, count):
    world, oracle = watched(replace(world, ranks=2, share=True), seed)
    world.run(list(in_namespaces(world.rng, count)), 0.0)
    check(world, oracle)


def test_the_worlds_have_every_reason():
    """The property above would hold of worlds in which nothing happens, too."""
    seen = set()
    for seed in range(40):
        rng = random.Random(seed)
        world = World(
            rng=rng,
            depth=seed % 3,
            num_drafts=0,
            num_blocks=rng.choice([14, 20, 80]),
            budget=16,
            policy="fcfs",
            share=seed % 10 > 0,
            groups=LAYOUTS[seed % len(LAYOUTS)],
        )
        world, oracle = watched(world, seed)
        world.run(list(in_namespaces(world.rng, 12)), 0.0)
        world.loop.reset_prefix_cache()
        world.run(
            [msgspec.structs.replace(one, id=f"again-{one.id}") for one in in_namespaces(random.Random(seed), 12)], 0.0
        )
        seen |= oracle.compared
    assert seen == {"new", "diverged", "evicted", "dropped", "namespace", "state", "last_block", "not_read", "off"}


def test_few_evictions_are_remembered_and_the_newest_are_among_them():
    from octavo.features.timeline.misses import Evictions

    gone = Evictions(8)
    for digest in range(1000):
        gone.add(digest, 1.0 + digest, digest % 2 == 0)
        assert len(gone) <= 16
    assert [gone.get(digest) for digest in range(992, 1000)] == [(1.0 + d, d % 2 == 0) for d in range(992, 1000)]
    assert gone.get(0) is None
    assert Miss("new", 1, 0).ago is None
