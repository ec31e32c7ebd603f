"""Steps that repeat the one before are those that the scheduler would have decided on from scratch."""

from __future__ import annotations

import random

import msgspec
import pytest

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import EOS, VOCAB, ToyDevice, toy_generate
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler
from octavo.schedule.steady import Steady

BLOCK = 4


class Recorder(ToyDevice):
    """Keeps what it was told to do."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.plans: list[tuple[object, ...]] = []

    def forward(self, plan):
        new = [(row.slot, row.tokens, row.num_computed, row.blocks) for row in plan.new]
        rows = (list(plan.slots), list(plan.num_tokens), list(plan.samples))
        self.plans.append((new, rows, list(plan.block_writes), list(plan.copies)))
        return super().forward(plan)


class Planned(ToyDevice):
    """Keeps the plans themselves."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.kept: list[StepPlan] = []

    def forward(self, plan):
        self.kept.append(plan)
        return super().forward(plan)


class Reader(EngineHook):
    """Reads along with the requests that have it as an option, and ends some of them: well, or with an error."""

    name = "reader"

    def __init__(self, opt_in: bool) -> None:
        self.opt_in = opt_in
        self.read: dict[tuple[str, int], list[int]] = {}

    def admit(self, request, num_tokens):
        if self.name in request.spec.options and sum(request.tokens) % 23 == 0:
            raise InvalidRequestError("A sum that it does not like.")
        return num_tokens

    def on_commit(self, request, tokens):
        if self.name not in request.spec.options:
            return False
        read = self.read.setdefault((request.id, request.index), [])
        read += tokens
        assert request.tokens[request.num_prompt :] == read
        return tokens[-1] % 17 == 0


def requests(rng: random.Random, count: int) -> list[GenerateRequest]:
    """Some continue what an earlier one says, so that they find its blocks while it runs."""
    prefix = [rng.randrange(1, VOCAB) for _ in range(9)]
    made = [
        GenerateRequest(
            id=f"r{i}",
            tokens=prefix[: rng.randrange(10)] + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 9))],
            params=SamplingParams(
                n=rng.choice([1, 1, 1, 3]), max_tokens=rng.randrange(1, 30), seed=i, ignore_eos=rng.random() < 0.8
            ),
            options={"reader": msgspec.Raw(b"\xc0")} if rng.random() < 0.5 else {},
        )
        for i in range(count)
    ]
    said = [r.tokens + toy_generate(r.tokens, 9, stop_ids=(), seed=r.params.seed) for r in made]
    return [msgspec.structs.replace(r, id=f"c{r.id}", tokens=said[i]) for i, r in enumerate(made[1:])] + made


def life(seed: int, depth: int, turns: int, hooks: list[EngineHook]) -> tuple[list[object], list[object]]:
    """All plans of an engine, and its news and counters after each step."""
    rng = random.Random(seed)
    num_blocks = rng.choice([24, 60])
    limits = Limits(max_num_seqs=5, max_num_batched_tokens=64, max_model_len=60, max_ahead=depth + 1, turns=turns)
    scheduler = Scheduler(KVCache(num_blocks, BLOCK), limits, make_policy("fcfs"), eos_token_ids=[EOS], hooks=hooks)
    device = Recorder(num_blocks)
    loop = EngineLoop(scheduler, device, depth)
    told: list[object] = []
    arrivals = requests(rng, 5)
    while arrivals or loop.busy:
        if arrivals and rng.random() < 0.2:
            loop.add(arrivals.pop())
        if rng.random() < 0.02:
            told.append([(d.id, d.index) for d in loop.abort(f"r{rng.randrange(5)}")])
        news = [(d.id, d.index, d.tokens, d.finish, d.num_cached) for d in loop.step()]
        stats = scheduler.stats()
        told.append((news, stats.kv_slots_filled, stats.num_blocks_used, stats.generation_tokens, stats.waste_sum))
    scheduler.check_idle()
    return device.plans, told


@pytest.mark.parametrize(
    ("depth", "turns"),
    [(0, 1), (1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (1, 2))), (2, 3)],
)
def test_a_repeated_step_is_the_one_that_would_have_been_decided_on(depth, turns, monkeypatch):
    repeated = 0
    follow = Steady.next

    def counted(self):
        nonlocal repeated
        draft = follow(self)
        repeated += draft is not None
        return draft

    monkeypatch.setattr(Steady, "next", counted)
    for _ in range(40):
        seed = random.randrange(2**32)
        readers = [Reader(opt_in=True), Reader(opt_in=False)]  # the second wants to be asked about every token
        quick = life(seed, depth, turns, [readers[0]])
        before = repeated
        slow = life(seed, depth, turns, [readers[1]])
        assert repeated == before
        assert readers[0].read == readers[1].read
        assert quick[0] == slow[0], f"seed {seed}: other plans"
        assert quick[1] == slow[1], f"seed {seed}: other news or counters"
    assert repeated > 100


class Witness(Reader):
    """Counts what it is asked and told."""

    admits_for_good = True

    def __init__(self) -> None:
        super().__init__(opt_in=True)
        self.asked = 0

    def admit(self, request, num_tokens):
        self.asked += 1
        return num_tokens

    def on_commit(self, request, tokens):
        assert self.name in request.spec.options, "told of a request that does not concern it"
        super().on_commit(request, tokens)
        return False


class Drafter(EngineHook):
    """Drafts for everybody, but only while the output has between so many tokens."""

    name = "drafter"
    opt_in = True
    max_drafts = 3

    def __init__(self, begin: int, end: int) -> None:
        self.range = range(begin, end)
        self.accepted = self.rejected = 0

    def drafts(self, request):
        return None if request.num_output in self.range else 0

    def on_verify(self, request, num_drafts, num_accepted):
        self.accepted += num_accepted
        self.rejected += num_drafts - num_accepted


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_are_repeated_until_a_feature_drafts_and_after_it(depth):
    """After the last drafts not before it is known how many were accepted: blocks are counted on from there."""

    def run(hooks):
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60, max_ahead=depth + 1)
        scheduler = Scheduler(KVCache(60, BLOCK), limits, make_policy("fcfs"), eos_token_ids=[EOS], hooks=hooks)
        scheduler.recover = None  # else it would hide what is wrong
        device = Planned(60)
        loop = EngineLoop(scheduler, device, depth)
        for i in range(3):
            params = SamplingParams(max_tokens=50, ignore_eos=True, seed=i)
            loop.add(GenerateRequest(id=f"r{i}", tokens=[5, 6, i], params=params))
        tokens: dict[str, list[int]] = {}
        while loop.busy:
            for delta in loop.step():
                tokens.setdefault(delta.id, []).extend(delta.tokens)
        scheduler.check_idle()
        return tokens, device.kept

    def repeats(plans):
        return sum(plan.repeats for plan in plans)

    tokens, plans = run([])
    idle_tokens, idle_plans = run([Drafter(99, 99)])
    assert (idle_tokens, idle_plans) == (tokens, plans)
    assert repeats(plans) > 20
    for end in range(14, 20):
        drafter = Drafter(10, end)
        drafted_tokens, drafted_plans = run([drafter])
        drafting = [i for i, plan in enumerate(drafted_plans) if plan.proposals]
        assert drafted_tokens == tokens
        assert repeats(drafted_plans[: drafting[0]]) > 5
        assert repeats(drafted_plans[drafting[-1] :]) > 10
        assert drafter.accepted
        assert drafter.rejected


class Fruitless(Planned):
    """Finds no drafts, and says so."""

    def _sample(self, step):
        super()._sample(step)
        step.output = msgspec.structs.replace(step.output, drafts=dict.fromkeys(step.plan.proposals, 0))

    def _draft(self, state, count):
        return []


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_that_search_for_drafts_in_vain_are_repeated(depth):
    """Where a step's tokens are known before the next is planned."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60, max_ahead=depth + 1)
    drafter = Drafter(10, 30)
    scheduler = Scheduler(KVCache(60, BLOCK), limits, make_policy("fcfs"), eos_token_ids=[EOS], hooks=[drafter])
    scheduler.recover = None
    device = Fruitless(60)
    loop = EngineLoop(scheduler, device, depth)
    said = {}
    for i in range(3):
        tokens, params = [5, 6, i], SamplingParams(max_tokens=50, ignore_eos=True, seed=i)
        loop.add(GenerateRequest(id=f"r{i}", tokens=tokens, params=params))
        said[f"r{i}"] = toy_generate(tokens, 50, stop_ids=(), seed=i)
    told: dict[str, list[int]] = {}
    while loop.busy:
        for delta in loop.step():
            told.setdefault(delta.id, []).extend(delta.tokens)
    scheduler.check_idle()
    assert told == said
    searching = [plan for plan in device.kept if plan.proposals]
    assert len(searching) == 20
    assert all(set(plan.proposals) == {0, 1, 2} for plan in searching)
    if depth == 0:
        assert all(plan.repeats and not any(plan.num_drafts) for plan in searching)
    else:
        assert not any(plan.repeats for plan in searching)


def test_who_admits_for_good_is_asked_once_and_told_of_each_token():
    witness = Witness()
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60, max_ahead=1)
    scheduler = Scheduler(KVCache(60, BLOCK), limits, make_policy("fcfs"), eos_token_ids=[EOS], hooks=[witness])
    loop = EngineLoop(scheduler, ToyDevice(60, BLOCK))
    for name, options in (
        ("with", {"reader": msgspec.Raw(b"\xc0")}),
        ("other", {"else": msgspec.Raw(b"\xc0")}),
        ("bare", {}),
    ):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        loop.add(GenerateRequest(id=name, tokens=[5, 6], params=params, options=options))
    while loop.busy:
        loop.step()
    assert len(witness.read["with", 0]) == 20
    assert witness.asked <= 6  # at its prompt and at the first step that can be repeated
