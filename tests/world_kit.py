"""A whole life of an engine: the real scheduler and loop on the toy device, and all that must hold of it at the end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

from octavo.cache.cache import KVCache
from octavo.core.cache_groups import FULL, CacheGroup, GroupKind
from octavo.core.errors import InvalidRequestError
from octavo.core.output import FinishReason, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import EOS, VOCAB, ToyDevice, toy_generate
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import POLICIES, make_policy
from octavo.schedule.scheduler import Limits, Scheduler

BLOCK = 4
MAX_LEN = 48


class Feedback(EngineHook):
    """A feature that needs the previous tokens before it lets some requests sample, and holds others up at times."""

    name = "feedback"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.alive: set[tuple[str, int]] = set()

    def admit(self, request, num_tokens):
        self.alive.add((request.id, request.index))
        return 0 if request.spec.priority and self.rng.random() < 0.2 else num_tokens

    def on_plan(self, draft, rows):
        draft.needs_feedback = any(r.spec.priority for r in rows)

    def before_sample(self, plan, rows):
        if plan.needs_feedback:
            assert all(r.inflight <= 1 for r in rows), "sampled before the previous tokens were known"
        return None

    def on_release(self, request):
        self.alive.discard((request.id, request.index))


class Drafter(EngineHook):
    """Wants up to `max_drafts` drafts, another number each time, and for some requests none."""

    name = "drafter"
    opt_in = True

    def __init__(self, rng: random.Random, max_drafts: int) -> None:
        self.rng = rng
        self.max_drafts = max_drafts

    def drafts(self, request):
        if request.num_output < self.rng.randrange(4):
            return 0
        return self.rng.choice([None, self.rng.randint(0, self.max_drafts)])

    def on_verify(self, request, num_drafts, num_accepted):
        assert 0 <= num_accepted <= num_drafts <= self.max_drafts


@dataclass
class World:
    """One engine and everything that was ever asked of it. Where it is `faulty`, requests may end with an error.

    `extra` are further features; their method `turn`, if they have one, is called between steps. One of them ends each
    request at the first token of `also_ends`. A client aborts a choice as soon as its output has one of the
    sequences `stops`, which stand for stop strings, perhaps in the middle of a delta. Each of `ranks` has `num_blocks`
    blocks.
    """

    rng: random.Random
    depth: int
    num_drafts: int
    num_blocks: int
    budget: int
    policy: str
    share: bool
    poison: int | None = None
    watermark: float = 0.0
    faulty: bool = False
    right_drafts: float = 0.6
    groups: tuple[CacheGroup, ...] = FULL
    ranks: int = 1
    extra: tuple[EngineHook, ...] = ()
    also_ends: frozenset[int] = frozenset()
    stops: tuple[tuple[int, ...], ...] = ()
    stopped: set[tuple[str, int]] = field(default_factory=set)
    asked: dict[str, GenerateRequest] = field(default_factory=dict)
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: Counter = field(default_factory=Counter)
    reasons: dict[tuple[str, int], TokenDelta] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.usable = self.num_blocks * len(self.groups)
        self.num_blocks = self.usable * self.ranks
        self.cache = KVCache(self.num_blocks, BLOCK, self.groups, self.budget, self.ranks)
        self.hook = Feedback(self.rng)
        self.hook.opt_in = self.rng.random() < 0.7
        limits = Limits(
            max_num_seqs=6,
            max_num_batched_tokens=self.budget,
            max_model_len=MAX_LEN,
            max_ahead=1 if self.depth > 1 and self.rng.random() < 0.5 else self.depth + 1,
            share_prefixes=self.share,
            watermark=self.watermark,
            paced_tokens=self.rng.choice([0, 1, 4, 12]),
            turns=self.depth + 1 if self.rng.random() < 0.3 else 1,
        )
        drafters = [Drafter(self.rng, self.num_drafts)] if self.num_drafts else []
        hooks = [self.hook, *drafters, *self.extra]
        self.scheduler = Scheduler(self.cache, limits, make_policy(self.policy), eos_token_ids=[EOS], hooks=hooks)
        self.device = ToyDevice(
            self.num_blocks,
            BLOCK,
            lazy=self.rng.random() < 0.7,
            seed=self.rng.random(),
            poison=self.poison,
            groups=self.groups,
            right_drafts=self.right_drafts,
        )
        self.loop = EngineLoop(self.scheduler, self.device, self.depth)
        self.may_fail = self.faulty or self.poison is not None
        if not self.may_fail:
            self.scheduler.recover = None  # else it would hide what is wrong

    def ask(self, request: GenerateRequest) -> None:
        self.asked[request.id] = request
        try:
            self.loop.add(request)
        except InvalidRequestError:
            generated = 0 if request.prompt_only else request.params.max_tokens
            need = len(request.tokens) + generated
            held = sum(hook.held_blocks(request) for hook in self.extra if hook.name in request.options)
            assert need > MAX_LEN or self.cache.blocks_for(need) + held > self.usable, "refused although it fits"
            del self.asked[request.id]

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.id, delta.index)
            assert not self.ends[key], "news after the end"
            assert delta.finish is not FinishReason.ERROR or self.may_fail, delta.error
            self.outputs.setdefault(key, []).extend(delta.tokens)
            if delta.finish is not None:
                self.ends[key] += 1
                self.reasons[key] = delta
        for key in dict.fromkeys((delta.id, delta.index) for delta in deltas if self.stops):
            self._stop(key)

    def _stop(self, key: tuple[str, int]) -> None:
        """Cut an output at the first stop, as a front end does, and abort the choice unless it has ended there."""
        end = first_stop(self.outputs[key], self.stops)
        if end is None or key in self.stopped:
            return
        self.stopped.add(key)
        if not self.ends[key]:
            self.take(self.loop.abort(*key))
        self.outputs[key] = self.outputs[key][:end]

    def run(self, arrivals: list[GenerateRequest], abort_rate: float) -> None:
        arrivals = list(arrivals)
        idle = 0
        while arrivals or self.loop.busy:
            if arrivals and self.rng.random() < 0.5:
                self.ask(arrivals.pop(0))
            if self.asked and self.rng.random() < abort_rate:
                victim = self.rng.choice(sorted(self.asked))
                choice = self.rng.choice([None, *range(self.asked[victim].params.n)])
                self.take(self.loop.abort(victim, choice))
            before = self.scheduler.stats().num_steps
            for hook in self.extra:
                getattr(hook, "turn", lambda: None)()
            self.take(self.loop.step())
            idle = idle + 1 if self.scheduler.stats().num_steps == before else 0
            assert idle < 200, "nothing happens any more"
            self.cache.check()
            for request in self.scheduler._requests.running:
                assert request.num_computed <= request.num_prompt + request.max_tokens, "drafts past the last token"
                if self.ranks > 1:
                    ranks = {block // self.usable for block in request.table.held}
                    assert ranks <= {request.table.rank}, "a request's blocks are not on its rank"

    def check(self) -> None:
        assert self.cache.num_free == self.num_blocks, "leak"
        assert not self.hook.alive, "a feature was not told of an end"
        assert len(self.scheduler._requests) == 0
        assert sorted(self.scheduler._requests._free_slots) == list(range(6))
        for request in self.asked.values():
            for index in range(request.params.n):
                self.check_choice(request, index)
        assert set(self.ends) == {(r.id, i) for r in self.asked.values() for i in range(r.params.n)}

    def check_choice(self, request: GenerateRequest, index: int) -> None:
        key = (request.id, index)
        params, delta = request.params, self.reasons[key]
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS}) | self.also_ends
        expected = toy_generate(request.tokens, params.max_tokens, stop_ids=stops, seed=params.seed + index)
        if request.prompt_only:
            stops, expected = set(), []
        end = first_stop(expected, self.stops) if self.stops else None
        assert self.ends[key] == 1
        if key in self.stopped:
            assert self.outputs[key] == expected[:end]
            return
        fatal = [*request.tokens, *expected[:-1]]
        assert end is None or delta.finish is FinishReason.ABORT
        if delta.finish is FinishReason.ABORT or (self.faulty and delta.finish is FinishReason.ERROR):
            assert self.outputs[key] == expected[: len(self.outputs[key])]
        elif self.poison in fatal:
            assert delta.finish is FinishReason.ERROR
            assert self.outputs[key] == expected[: max(0, fatal.index(self.poison) + 1 - len(request.tokens))]
        else:
            assert self.outputs[key] == expected
            stopped = request.prompt_only or expected[-1] in stops
            assert delta.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert not request.prompt_only or request.reads_cache or not delta.num_cached


def first_stop(tokens: list[int], stops: tuple[tuple[int, ...], ...]) -> int | None:
    """Return where the first of these sequences ends; None if there is none."""
    ends = [end for end in range(1, len(tokens) + 1) for one in stops if tuple(tokens[:end][-len(one) :]) == one]
    return min(ends, default=None)


WINDOW = CacheGroup(GroupKind.WINDOW, window=6)
STATE = CacheGroup(GroupKind.STATE, snapshot_tokens=8)
LAYOUTS = [
    FULL,
    (WINDOW,),
    (STATE,),
    (*FULL, WINDOW),
    (*FULL, STATE),
    (WINDOW, CacheGroup(GroupKind.WINDOW, window=1), STATE),
    (*FULL, *FULL, CacheGroup(GroupKind.WINDOW, window=17), STATE),
]


@st.composite
def worlds(draw, layouts=(FULL,)):
    groups = draw(st.sampled_from(layouts))
    depth = draw(st.integers(0, 2))
    return World(
        rng=random.Random(draw(st.integers(0, 2**32))),
        depth=depth,
        num_drafts=draw(st.sampled_from([0, 0, 1, 2, 3, 4, 5, 6, 7])),
        num_blocks=draw(st.sampled_from([9, 14, 20, 80])),
        budget=draw(st.sampled_from([6, 9, 16, 64])),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        share=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        right_drafts=draw(st.sampled_from([0.6, 0.0, 0.3, 0.9, 1.0])),
        groups=groups,
    )


def random_requests(rng: random.Random, count: int) -> list[GenerateRequest]:
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(rng.choice([4, 8, 13]))] for _ in range(3)]
    requests = []
    for i in range(count):
        prompt = rng.choice(prefixes) + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(14))]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.randrange(1, 16),
            seed=rng.randrange(3),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.3 else None,
        )
        alone = rng.random() < 0.2
        requests.append(
            GenerateRequest(
                id=f"r{i}",
                tokens=prompt,
                params=params.replace(n=1) if alone else params,
                priority=rng.choice([0, 0, 1, 2]),
                tenant=f"tenant {i % 3}",
                prompt_only=alone,
                reads_cache=rng.random() < 0.8,
            )
        )
    return requests
