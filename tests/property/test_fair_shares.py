"""The fair policy: what each tenant gets, on the toy device, whatever others queue."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import World, random_requests

from octavo.cache.cache import KVCache
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import EOS, VOCAB, ToyDevice, toy_generate
from octavo.schedule.limits import Limits
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Scheduler
from octavo.schedule.shares import COST_OUTPUT, COST_PROMPT, MOST_ACCOUNTS

BLOCK = 4
MOST_PROMPT, MOST_OUTPUT = 12, 24
COST = COST_PROMPT * MOST_PROMPT + COST_OUTPUT * MOST_OUTPUT
"""The most that one request here costs."""


class Shared:
    """An engine with tenants. `served` is the cost of what each has had."""

    def __init__(self, seqs=4, budget=32, depth=0, weights=None, policy="fair", num_blocks=400):
        limits = Limits(
            max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=256, max_ahead=depth + 1,
        )  # fmt: skip
        policy = make_policy(policy, weights)
        self.scheduler = Scheduler(KVCache(num_blocks, BLOCK), limits, policy, eos_token_ids=[EOS])
        self.loop = EngineLoop(self.scheduler, ToyDevice(num_blocks, BLOCK), depth)
        self.served = Counter()
        self.asked = {}
        self.outputs = {}
        self.preempted = {}
        self.ended = []

    def ask(self, tenant, prompt, max_tokens, **params):
        name = f"{tenant}/{len(self.asked)}"
        priority = params.pop("priority", 0)
        params = SamplingParams(max_tokens=max_tokens, seed=0, **params)
        self.asked[name] = request = GenerateRequest(
            id=name, tokens=list(prompt), params=params, tenant=tenant, priority=priority
        )
        self.loop.add(request)
        return name

    def step(self):
        for delta in self.loop.step():
            assert not delta.error
            request = self.asked[delta.id]
            if delta.id not in self.outputs:
                self.served[request.tenant] += COST_PROMPT * (len(request.tokens) - delta.num_cached)
            self.outputs.setdefault(delta.id, []).extend(delta.tokens)
            self.served[request.tenant] += COST_OUTPUT * len(delta.tokens)
            if delta.finish:
                self.ended.append(delta.id)
                self.preempted[delta.id] = delta.num_preemptions

    def waiting(self):
        """How many requests of each tenant have no slot."""
        alive = self.scheduler._requests.choices(None, None)
        return Counter(request.spec.tenant for request in alive if request.slot < 0 and request.finish is None)

    def slots(self):
        return Counter(request.spec.tenant for request in self.scheduler._requests.running if request.finish is None)

    def run(self):
        while self.loop.busy:
            self.step()
        return self

    @property
    def accounts(self):
        return self.scheduler._requests._policy._accounts


def prompt_of(rng, number):
    """A prompt that shares no block with others."""
    return [1 + number % 49, 1 + number // 49 % 49, *(rng.randrange(1, VOCAB) for _ in range(rng.randrange(10)))]


@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from([0.5, 1, 3]),
    st.sampled_from([1, 24]),
)
@settings(max_examples=examples(40), deadline=None)
def test_two_tenants_that_always_queue_get_service_by_weight(seed, seqs, depth, weight, shortest):
    """While both wait, their service differs by what the slots hold and one request, whatever they ask for, in
    whichever order, and wherever their answers end."""
    rng = random.Random(seed)
    engine = Shared(seqs, rng.choice([8, 32]), depth, {"a": weight})
    bound = (seqs + 1) * COST * (1 / weight + 1)
    enough = 2 * int(bound / (2 * COST_OUTPUT)) // 3 + 20
    for tenant, least in sorted({"a": 1, "b": shortest}.items(), key=lambda one: rng.random()):
        for _ in range(enough):
            most = rng.randint(least, MOST_OUTPUT)
            engine.ask(tenant, prompt_of(rng, len(engine.asked)), most, ignore_eos=rng.random() < 0.5)
    while True:
        waiting = engine.waiting()
        if not (waiting["a"] and waiting["b"]):
            break
        engine.step()
        apart = engine.served["a"] / weight - engine.served["b"]
        assert abs(apart) <= bound
    assert sum(engine.served.values()) > bound / 2
    engine.run()
    assert len(engine.ended) == len(engine.asked)


@pytest.mark.parametrize(("weights", "slots"), [({}, {"a": 4, "b": 4}), ({"a": 3}, {"a": 6, "b": 2})])
def test_equal_requests_hold_slots_by_weight(weights, slots):
    engine = Shared(seqs=8, weights=weights, budget=64)
    for tenant in ("a", "b"):
        for _ in range(60):
            engine.ask(tenant, prompt_of(random.Random(0), len(engine.asked)), 20, ignore_eos=True)
    seen = Counter()
    for _ in range(120):
        engine.step()
        seen[tuple(sorted(engine.slots().items()))] += 1
    assert seen.pop(()) <= 6  # all end in one step
    assert seen.keys() == {tuple(slots.items())}


@pytest.mark.parametrize(("depth", "length"), [(0, 4), (1, 200)])
def test_a_light_tenant_does_not_wait_for_ten_thousand_requests(depth, length):
    """It gets a place in the next steps: a free one, or one of the tenant that has all."""
    engine = Shared(seqs=8, budget=32, depth=depth)
    for number in range(10_000):
        engine.ask("heavy", prompt_of(random.Random(number), number), length, ignore_eos=True)
    for _ in range(60):
        engine.step()
    for number in range(5):
        name = engine.ask("light", [7, 3, 40 + number], 4, ignore_eos=True)
        before, steps = engine.served["heavy"], 0
        while name not in engine.outputs:
            engine.step()
            steps += 1
        assert steps <= 4 + depth
        assert engine.served["heavy"] - before <= steps * COST_OUTPUT * 32
        while name not in engine.ended:
            engine.step()
    assert engine.waiting()["heavy"] > 9_000
    assert engine.outputs[name] == toy_generate([7, 3, 44], 4, stop_ids=())


def test_nobody_starves_behind_many_tenants():
    """Requests of a tenant that is ahead wait for a part of the new ones, although these never end."""
    engine = Shared(seqs=2)
    for number in range(4):
        engine.ask("ahead", prompt_of(random.Random(number), number), 20, ignore_eos=True)
    for _ in range(12):
        engine.step()
    engine.ask("ahead", [9, 9, 9], 20, ignore_eos=True)
    for number in range(120):  # a name for each request, more than the engine can serve
        engine.ask(f"name {number}", prompt_of(random.Random(number), 100 + number), 4, ignore_eos=True)
        engine.step()
        engine.step()
        assert number < 10 or engine.waiting() - Counter({"ahead": 3})
    assert sum(name.startswith("ahead") for name in engine.ended) >= 3


def test_idle_time_is_no_credit():
    engine = Shared()
    for number in range(80):
        engine.ask("busy", prompt_of(random.Random(number), number), 20, ignore_eos=True)
    engine.ask("idle", [3, 3, 3], 1)
    while len(engine.ended) < 40:
        engine.step()
    before = engine.served["busy"] - engine.served["idle"]
    assert before > 2 * 5 * COST  # what would be credit
    for number in range(40):
        engine.ask("idle", prompt_of(random.Random(number), 100 + number), 20, ignore_eos=True)
    while all(engine.waiting()[tenant] for tenant in ("busy", "idle")):
        engine.step()
        assert abs(engine.served["busy"] - before - engine.served["idle"]) <= 2 * 5 * COST


def test_who_asks_for_more_than_it_takes_is_not_punished():
    """Answers that may have 100 tokens and stop after a few are charged a few."""
    engine = Shared(seqs=2)
    for number in range(400):
        prompt = prompt_of(random.Random(number), number)
        stop = toy_generate(prompt, 3, stop_ids=())[2]
        engine.ask("modest", prompt, 3, ignore_eos=True)
        engine.ask("greedy", prompt[::-1], 100, stop_token_ids=[stop])
    while all(engine.waiting().values()) and len(engine.ended) < 300:
        engine.step()
        assert abs(engine.served["modest"] - engine.served["greedy"]) <= 3 * 2 * (12 + COST_OUTPUT * 100)
    value = {key[0]: account.value for key, account in engine.accounts._accounts.items()}
    unit = next(iter(engine.accounts._accounts.values())).of_cost(1)
    assert abs(value["modest"] - value["greedy"]) / unit < 2 * COST_OUTPUT * 100


@pytest.mark.parametrize("cached", [0, 40])
def test_an_aborted_prompt_costs_what_was_computed(cached):
    engine = Shared(seqs=1, budget=16)
    prompt = [7] * cached + list(range(1, 100))
    if cached:
        engine.ask("a", prompt[:cached], 1)
        engine.run()
    engine.ask("a", prompt, 2)
    account = next(iter(engine.accounts._accounts.values()))
    before = account.value
    for _ in range(2):
        engine.step()
    engine.loop.abort(None)
    engine.run()
    assert (account.value - before) // account.of_cost(1) == 2 * 16 * COST_PROMPT


def test_what_the_cache_has_is_free():
    engine = Shared(seqs=1)
    prompt = list(range(1, 42))
    costs = []
    for _ in range(2):
        before = max((account.value for account in engine.accounts._accounts.values()), default=0)
        engine.ask("a", prompt, 2, ignore_eos=True)
        engine.run()
        account = next(iter(engine.accounts._accounts.values()))
        costs.append((account.value - before) // account.of_cost(1))
    assert costs == [41 * COST_PROMPT + 2 * COST_OUTPUT, 1 * COST_PROMPT + 2 * COST_OUTPUT]


@pytest.mark.parametrize("depth", [0, 1])
def test_long_answers_give_way(depth):
    """At once for a tenant without a slot; as answers exceed what was expected, until slots are shared by weight."""
    engine = Shared(seqs=6, depth=depth, weights={"heavy": 2})
    for number in range(12):
        engine.ask("heavy", [1 + number, 5, 6], 240, ignore_eos=True)
    for _ in range(20):
        engine.step()
    assert engine.slots() == {"heavy": 6}
    for number in range(6):
        engine.ask("light", [20 + number, 5, 6], 240, ignore_eos=True)
    for _ in range(3):
        engine.step()
    assert engine.slots() == {"heavy": 5, "light": 1}
    while not engine.ended:
        engine.step()
    assert engine.slots() - Counter([engine.ended[0].split("/")[0]]) <= Counter(heavy=4, light=2)
    engine.run()
    assert max(engine.preempted.values()) == 1
    assert 2 <= sum(engine.preempted.values()) <= 4
    for name, request in engine.asked.items():
        assert engine.outputs[name] == toy_generate(request.tokens, 240, stop_ids=())


def test_background_work_is_shared_apart_from_the_rest():
    """It comes last, and costs its tenant nothing of what is not background."""
    engine = Shared(seqs=2)
    for number in range(20):
        engine.ask("a", [1 + number, 2, 3], 10, ignore_eos=True, priority=BACKGROUND)
    for number in range(8):
        engine.ask("b", [1 + number, 3, 4], 10, ignore_eos=True, priority=BACKGROUND)
    for _ in range(30):
        engine.step()
    assert min(engine.served["a"], engine.served["b"]) > 40
    a, b = engine.ask("a", [30, 1], 4, ignore_eos=True), engine.ask("b", [31, 1], 4, ignore_eos=True)
    for _ in range(8):
        engine.step()
    assert {a, b} <= set(engine.ended)


def test_accounts_are_bounded_and_forgotten_when_that_changes_nothing():
    engine = Shared(seqs=4, weights={"known": 2})
    for number in range(3 * MOST_ACCOUNTS):
        engine.ask(f"n{number}", [1 + number % 49, 1 + number // 49 % 49, 7], 1, ignore_eos=True)
    assert len(engine.accounts) == MOST_ACCOUNTS + 1  # the last one is that of all further names
    engine.ask("known", [1, 1, 1], 1)
    assert len(engine.accounts) == MOST_ACCOUNTS + 2
    engine.run()
    assert len(engine.ended) == 3 * MOST_ACCOUNTS + 1
    assert not engine.accounts._charges
    engine.ask("new", [1, 2, 2], 1)
    assert len(engine.accounts) == 1
    engine.run()


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([0.0, 0.1]))
@settings(max_examples=examples(150), deadline=None)
def test_first_is_who_ranks_first(seed, count, abort_rate):
    """Lines find what the order of all ranks finds, also after failures, aborts and preemptions."""
    rng = random.Random(seed)
    world = World(
        rng=rng, depth=rng.randrange(3), num_drafts=0, num_blocks=rng.choice([9, 20]), budget=16, policy="fair",
        share=True, poison=rng.choice([None, 7]),
    )  # fmt: skip
    queue, policy = world.scheduler._requests.waiting, world.scheduler._requests._policy

    step = world.loop.step

    def watched():
        deltas = step()
        alive = world.scheduler._requests.choices(None, None)
        waiting = [request for request in alive if request.slot < 0 and request.finish is None]
        assert len(queue) == len(waiting)
        assert queue.peek() is min(waiting, key=policy.rank, default=None)
        return deltas

    world.loop.step = watched
    world.run(random_requests(rng, count), abort_rate)
    world.check()
    assert not policy._accounts._charges


@pytest.mark.parametrize("weight", [0, -1, "2", True, float("nan"), 1e9])
def test_weights_that_are_none_are_refused(weight):
    with pytest.raises(ConfigError, match=r"--tenant-weights: the weight of 'a' must be a number from 0.001 to 1,000"):
        make_policy("fair", {"a": weight})


def test_weights_need_the_policy_that_weighs():
    with pytest.raises(ConfigError, match="no effect with --scheduling-policy fcfs: choose fair"):
        make_policy("fcfs", {"a": 2})
