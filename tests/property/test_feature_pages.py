"""A feature's data in KV blocks, on the toy device: loaded while others run, read by steps, given back in need."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_kit import PageDevice, PageMover
from test_faults_anywhere import WITHIN, Fault, faults
from test_tiers import shelved
from world_kit import LAYOUTS, World, random_requests, worlds

from octavo.cache.block_pool import BlockPool
from octavo.cache.cache import KVCache
from octavo.cache.lease import Lease
from octavo.core.errors import InvalidRequestError
from octavo.core.output import FinishReason
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.schedule.hooks import NO_ROOM, EngineHook
from octavo.schedule.limits import Limits
from octavo.schedule.pages import PageLoads, Pages
from octavo.schedule.policy import make_policy
from octavo.schedule.request import Request
from octavo.schedule.scheduler import Scheduler


@dataclass(eq=False)
class Chest:
    """Data that requests read while they run."""

    key: int
    lease: Lease | None = None
    ready: bool = False
    failed: bool = False
    """Its load failed, and its blocks are not given back yet."""
    requests: set[Request] = field(default_factory=set)
    revision: str = ""

    @property
    def names(self) -> list[bytes]:
        return [bytes([self.key, page]) for page in range(1 + self.key % 3)]

    @property
    def busy(self) -> bool:
        """A step may read it, or a load writes it."""
        loading = self.lease is not None and not (self.ready or self.failed)
        return loading or any(request.slot >= 0 for request in self.requests)


class Vault(EngineHook):
    """Requests name a chest, which must be in blocks while they run."""

    name = "vault"
    opt_in = True
    admits_for_good = True

    def __init__(self) -> None:
        self.chests: dict[int, Chest] = {}
        self.pages = None
        self.reclaimed = self.lost = 0

    def attach(self, pages):
        self.pages = pages

    def chest(self, spec: GenerateRequest) -> Chest:
        key = msgspec.msgpack.decode(spec.options[self.name])
        return self.chests.setdefault(key, Chest(key))

    def namespace(self, spec):
        if msgspec.msgpack.decode(spec.options[self.name]) == 99:
            raise InvalidRequestError("There is no such chest.", param="chest", value=99)
        return str(self.chest(spec).key)

    def revision(self, request):
        return self.chest(request.spec).revision

    def held_blocks(self, spec):
        return len(self.chest(spec).names)

    def on_add(self, request):
        self.chest(request.spec).requests.add(request)

    def admit(self, request, num_tokens):
        if self.name not in request.spec.options:
            return num_tokens
        chest = self.chest(request.spec)
        if chest.ready:
            return num_tokens
        if chest.failed:
            self.put_back(chest)
        if chest.lease is not None:
            return 0
        missing = self.pages.missing(len(chest.names), request)
        if missing > 0:
            self.reclaim(missing, request)
        if self.pages.missing(len(chest.names), request) > 0:
            return NO_ROOM
        lease = self.pages.take(len(chest.names))
        try:
            self.pages.load(chest.names, list(lease.held), lambda whole: self.loaded(chest, whole))
        except Exception:
            lease.release()
            raise
        chest.lease = lease
        return 0

    def loaded(self, chest, whole):
        chest.ready, chest.failed = whole, not whole
        if not whole:
            self.put_back(chest)

    def put_back(self, chest):
        chest.ready, chest.failed = False, True  # first: if the release fails, it is repeated, and no step reads it
        chest.lease.release()
        chest.lease, chest.failed = None, False

    def reclaim(self, num_blocks, request):
        own = self.chest(request.spec) if self.name in request.spec.options else None
        for chest in sorted(self.chests.values(), key=lambda one: bool(one.requests)):
            if num_blocks > 0 and chest is not own and (chest.ready or chest.failed) and not chest.busy:
                num_blocks -= len(chest.names)
                self.put_back(chest)
                self.reclaimed += 1

    def on_failure(self):
        self.lost += 1

    def on_park(self):
        for chest in self.chests.values():
            assert not chest.busy
            if chest.lease is not None:
                self.put_back(chest)

    def on_plan(self, draft, rows):
        used = {self.chest(r.spec) for r in rows if self.name in r.spec.options}
        if used:
            draft.payload[self.name] = [(c.names, list(c.lease.held)) for c in used]

    def on_release(self, request):
        if self.name in request.spec.options:
            self.chest(request.spec).requests.discard(request)


def read(plan):
    return [pair for names, blocks in plan.payload.get("vault", ()) for pair in zip(names, blocks, strict=True)]


def vaulted(world: World, *, tier=False, **mover) -> World:
    """The world with a vault, and maybe with a tier beside it."""
    rng = random.Random(world.rng.random())
    world = replace(world, rng=rng, extra=(*world.extra, Vault()))
    others = None
    if tier:
        world = shelved(world)
        others = world.device._mover
        others.check = lambda name, page: None  # it knows only names of one namespace
    world.device.__class__ = PageDevice
    world.device.read = read
    world.device._mover = PageMover("vault", rng, rng.choice([0.3, 0.5, 1.0]), others=others, **mover)
    world.scheduler.attach(lambda *call: pytest.fail("nothing is called"))
    return world


def with_chests(rng, requests, kinds=6):
    option = [{"vault": msgspec.Raw(msgspec.msgpack.encode(key))} for key in range(kinds)]
    return [r if rng.random() < 0.3 else msgspec.structs.replace(r, options=rng.choice(option)) for r in requests]


def settle(world: World) -> Vault:
    """Everything is given back at the end."""
    vault = next(hook for hook in world.extra if isinstance(hook, Vault))
    assert not any(chest.requests for chest in vault.chests.values())
    world.scheduler.check_idle()
    world.scheduler.park()
    assert not world.cache.leases
    world.check()
    assert not world.scheduler._loads.active
    return vault


@given(worlds(LAYOUTS), st.integers(1, 14), st.sampled_from([0.0, 0.05]), st.floats(0, 0.2), st.booleans())
@settings(max_examples=120)
def test_any_life_of_an_engine_with_pages(world, count, abort_rate, failures, tier):
    world = vaulted(world, tier=tier, failures=failures)
    world.run(with_chests(world.rng, random_requests(world.rng, count)), abort_rate)
    settle(world)


@given(worlds(LAYOUTS), st.integers(2, 12), st.integers(0, 2**32))
@settings(max_examples=80)
def test_steps_that_fail_lose_no_page(world, count, seed):
    world = vaulted(replace(world, faulty=True), failures=0.1)
    world.device._fail_at = frozenset(random.Random(seed).sample(range(60), 5))
    world.run(with_chests(world.rng, random_requests(world.rng, count)), 0.02)
    settle(world)


def test_blocks_that_a_failing_feature_took_are_free_again(monkeypatch):
    """The pool fails between the blocks of a lease."""
    loop, scheduler, _, _ = small_engine(depth=0)
    fault = Fault(BlockPool, "take_blank", 1, after=False)
    fault.install(monkeypatch)
    fault.within(monkeypatch, Scheduler, "plan")
    loop.add(asking("cold", [1, 2, 3], 2))
    loop.add(asking("plain", [4, 5, 6]))
    ends = {delta.id: delta.finish for _ in iter(lambda: loop.busy, False) for delta in loop.step() if delta.finish}
    assert ends == {"cold": FinishReason.ERROR, "plain": FinishReason.LENGTH}
    scheduler.check_idle()


@pytest.mark.parametrize("after", [False, True])
def test_a_failure_to_report_a_load_harms_no_request(monkeypatch, after):
    """Two loads end together with a step of another request; the first is not reported to its feature, or just was."""
    loop, scheduler, vault, mover = small_engine(depth=0)
    fault = Fault(PageLoads, "_tell", 0, after=after)
    fault.install(monkeypatch)
    fault.within(monkeypatch, Scheduler, "commit")
    for name, key in [("cold", 2), ("cool", 1), ("plain", None)]:
        loop.add(asking(name, [1, 2, 3], key))
    ends = {delta.id: delta.finish for _ in range(40) for delta in loop.step() if delta.finish}
    assert fault.left < 0, "nothing failed"
    assert ends == dict.fromkeys(["cold", "cool", "plain"], FinishReason.LENGTH)
    assert vault.lost == 0
    assert mover.count == (5 if after else 8), "a load whose end was not reported is repeated"
    scheduler.park()
    assert not scheduler.cache.leases


def test_a_failure_to_report_a_load_that_no_request_waits_for_loses_no_blocks(monkeypatch):
    loop, scheduler, _, mover = small_engine(depth=0)
    fault = Fault(PageLoads, "_tell", 0, after=False)
    fault.install(monkeypatch)
    fault.within(monkeypatch, Scheduler, "commit")
    mover.latency = 0.0
    loop.add(asking("cold", [1, 2, 3], 2))
    loop.step()
    loop.abort("cold")
    mover.latency = 1.0
    for _ in range(10):
        loop.step()
    assert fault.left < 0, "nothing failed"
    scheduler.park()
    assert not scheduler.cache.leases


def test_blocks_whose_load_could_not_begin_are_free_again(monkeypatch):
    loop, scheduler, _, _ = small_engine(depth=0)
    fault = Fault(PageLoads, "begin", 0, after=False)
    fault.install(monkeypatch)
    fault.within(monkeypatch, Scheduler, "plan")
    loop.add(asking("cold", [1, 2, 3], 2))
    loop.add(asking("next", [4, 5, 6], 2))
    ends = {delta.id: delta.finish for _ in range(40) for delta in loop.step() if delta.finish}
    assert ends == {"cold": FinishReason.ERROR, "next": FinishReason.LENGTH}
    scheduler.park()
    assert not scheduler.cache.leases


def test_a_feature_that_fails_to_admit_a_request_leaves_cached_prefixes():
    loop, _, vault, _ = small_engine(depth=0)
    loop.add(asking("first", [7] * 13))
    finish(loop)
    vault.admit = None
    loop.add(asking("refused", [1, 2, 3], 2))
    finish(loop)
    del vault.admit
    loop.add(asking("again", [7] * 13))
    deltas = []
    while loop.busy:
        deltas += loop.step()
    assert deltas[-1].num_cached == 12


HANDOVERS = {(KVCache, "lease_new"), (Pages, "take"), (PageLoads, "begin"), (Pages, "load")}
"""Functions after whose work the feature has the lease, or the load has begun: nothing inside is left to fail."""


@given(
    worlds(LAYOUTS),
    faults(WITHIN).filter(lambda fault: not (fault.after and (fault.owner, fault.name) in HANDOVERS)),
    st.integers(1, 12),
    st.sampled_from(["commit", "plan"]),
)
@settings(max_examples=80)
def test_a_failure_of_any_function_of_the_scheduler_harms_one_request(world, fault, count, within):
    world = vaulted(replace(world, faulty=True), failures=0.1)
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        fault.within(patch, Scheduler, within)
        world.run(with_chests(world.rng, random_requests(world.rng, count)), 0.02)
    settle(world)
    assert sum(end.finish is FinishReason.ERROR for end in world.reasons.values()) <= 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_long_run_takes_pages_back(depth):
    """Tight memory: chests come and go, requests are preempted, and every page is loaded again when it is needed."""
    world = World(
        rng=random.Random(depth), depth=depth, num_drafts=0, num_blocks=20, budget=16, policy="fcfs", share=True
    )
    world = vaulted(world)
    world.run(with_chests(world.rng, random_requests(world.rng, 200)), abort_rate=0.01)
    vault = settle(world)
    assert vault.reclaimed > 20
    assert world.scheduler.stats().num_preemptions > 0
    assert world.device._mover.count > 50


def small_engine(depth=1, num_blocks=20):
    """An engine with a vault, whose loads end when `mover.latency` says so."""
    vault, mover = Vault(), PageMover("vault", random.Random(0), 1.0)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=60, max_ahead=depth + 1)
    scheduler = Scheduler(KVCache(num_blocks, 4), limits, make_policy("fcfs"), hooks=[vault])
    device = PageDevice(num_blocks, 4, mover=mover)
    device.read = read
    scheduler.attach(lambda *call: pytest.fail("nothing is called"))
    return EngineLoop(scheduler, device, depth), scheduler, vault, mover


def asking(name, tokens, key=None, max_tokens=4):
    options = {} if key is None else {"vault": msgspec.Raw(msgspec.msgpack.encode(key))}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return GenerateRequest(id=name, tokens=tokens, params=params, options=options)


def finish(loop):
    order = []
    while loop.busy:
        order += [delta.id for delta in loop.step() if delta.finish is not None]
    return order


def test_others_pass_a_request_that_waits_for_its_pages():
    loop, _, _, mover = small_engine()
    mover.latency = 0.0
    loop.add(asking("cold", [1, 2, 3], 2))
    loop.add(asking("plain", [4, 5, 6]))
    order = []
    while "plain" not in order:
        order += [delta.id for delta in loop.step() if delta.finish is not None]
    mover.latency = 1.0
    assert order + finish(loop) == ["plain", "cold"]


def test_a_plan_follows_at_once_when_pages_have_come():
    loop, _, _, mover = small_engine()
    mover.latency = 0.0
    loop.add(asking("cold", [1, 2, 3], 2))
    for _ in range(3):
        loop.step()
        assert loop.starved
    mover.latency = 1.0
    loop.step()
    assert mover.count
    assert not loop.starved
    assert finish(loop) == ["cold"]


def test_a_request_that_lacks_blocks_for_its_pages_is_not_starved_by_smaller_ones():
    loop, _, _, _ = small_engine(num_blocks=15)
    loop.add(asking("first", [1] * 20, max_tokens=24))
    loop.step()
    loop.add(asking("needs pages", [2] * 34, 2, max_tokens=4))
    for number in range(12):
        loop.add(asking(f"small {number}", [3 + number] * 4, max_tokens=20))
    order = finish(loop)
    assert order[0] == "first"
    assert order.index("needs pages") < 8, "it was passed until nothing was left"


def ended(loop):
    """All news until no request is left."""
    deltas = []
    while loop.busy:
        deltas += loop.step()
    return deltas


def test_requests_share_prefixes_only_within_a_namespace():
    loop, _, _, _ = small_engine(num_blocks=40)
    cached = []
    for name, key in [("a", 1), ("b", 1), ("c", 2), ("d", None)]:
        loop.add(asking(name, [7] * 13, key))
        cached.append(max(delta.num_cached for delta in ended(loop)))
    assert cached == [0, 12, 0, 0]


def test_a_revision_counts_that_came_while_a_request_waited():
    loop, _, vault, _ = small_engine(num_blocks=40)
    cached = []
    for number, revision in enumerate(["", "", "x", "x", "y", "x", ""]):
        loop.add(asking(f"r{number}", [7] * 13, 1))
        vault.chests[1].revision = revision
        cached.append(max(delta.num_cached for delta in ended(loop)))
    assert cached == [0, 12, 0, 12, 0, 12, 12]


def test_what_can_never_fit_is_refused_with_the_numbers():
    loop, scheduler, _, _ = small_engine(num_blocks=8)
    loop.add(asking("plain", [1] * 20, max_tokens=12))
    with pytest.raises(InvalidRequestError, match="need 8 KV blocks and 3 for what its features load, but the whole"):
        loop.add(asking("with pages", [1] * 20, 2, max_tokens=12))
    with pytest.raises(InvalidRequestError, match="no such chest"):
        loop.add(asking("unknown", [1], 99))
    finish(loop)
    scheduler.check_idle()


def test_a_sleep_gives_the_pages_back_and_they_return_with_the_next_request():
    loop, scheduler, vault, mover = small_engine()
    loop.add(asking("a", [1, 2, 3], 2))
    finish(loop)
    assert vault.chests[2].ready
    assert scheduler.lessees() == []
    scheduler.park()
    assert scheduler.cache.num_free == 20
    before = mover.count
    loop.add(asking("b", [1, 2, 3], 2))
    assert finish(loop) == ["b"]
    assert mover.count == before + 3


def test_the_toy_device_notices_pages_that_were_given_back_too_early():
    loop, _, vault, _ = small_engine()
    loop.add(asking("a", [1, 2, 3], 2, max_tokens=20))
    while not vault.chests or not any(r.slot >= 0 for r in vault.chests[2].requests):
        loop.step()
    block = next(iter(vault.chests[2].lease.held))
    loop._executor._cells[block] = [(0,)] * 4
    with pytest.raises(AssertionError, match="not page"):
        [loop._step([]) for _ in range(3)]
