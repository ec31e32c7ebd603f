"""How many drafts a request gets: the smallest of all bounds, and none where they can't be taken back."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.cache.cache import KVCache
from octavo.core.cache_groups import FULL, CacheGroup, GroupKind
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.worker_info import most_results
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice, toy_generate
from octavo.schedule.drafts import DraftBounds
from octavo.schedule.hooks import EngineHook
from octavo.schedule.limits import Limits
from octavo.schedule.policy import make_policy
from octavo.schedule.request import Request
from octavo.schedule.scheduler import Scheduler
from octavo.schedule.siblings import make_siblings

BLOCK = 4


class Bound(EngineHook):
    """Says a number, or nothing, for the requests that have it as an option."""

    def __init__(self, name: str, bound: int | None, max_drafts: int = 0) -> None:
        self.name = name
        self.bound = bound
        self.max_drafts = max_drafts

    def drafts(self, request: Request) -> int | None:
        return self.bound


def request(max_tokens: int = 50, lockstep: Any = None) -> Request:
    spec = GenerateRequest(id="r", tokens=[1, 2], params=SamplingParams(max_tokens=max_tokens, seed=0))
    made = make_siblings(spec, max_tokens, frozenset(), Any, 0)[0]
    made.siblings.lockstep = lockstep
    return made


def bounds(hooks: list[EngineHook], *, budget: int = 64, groups: tuple[CacheGroup, ...] = FULL) -> DraftBounds:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=100)
    return DraftBounds(hooks, limits, KVCache(40, BLOCK, groups))


@pytest.mark.parametrize(
    ("said", "expected"),
    [([None], 5), ([3], 3), ([9], 5), ([None, 2], 2), ([3, 0], 0), ([-1], 0), ([4, None, 2], 2)],
)
def test_the_smallest_bound_holds(said: list[int | None], expected: int) -> None:
    hooks: list[EngineHook] = [Bound("a", said[0], max_drafts=5), *(Bound("b", one) for one in said[1:])]
    assert bounds(hooks).following(request(), num_running=1) == expected


def test_room_in_the_step_and_in_the_output() -> None:
    """A step of 64 tokens holds all running requests; the output ends with what is certain to follow the last draft."""
    some = bounds([Bound("a", None, max_drafts=7)])
    assert [some.following(request(), running) for running in (1, 8, 16, 32, 64)] == [7, 7, 3, 1, 0]
    assert [some.following(request(tokens), 1) for tokens in (9, 8, 3, 2, 1)] == [7, 7, 2, 1, 0]


def test_the_logits_of_a_step_are_bounded() -> None:
    """64 requests have all their drafts. Where more run, they share as many, so that the logits of a step fit."""
    some = bounds([Bound("a", None, max_drafts=3)], budget=4096)
    shares = {running: some.following(request(), running) for running in (64, 65, 100, 192, 193)}
    assert shares == {64: 3, 65: 2, 100: 1, 192: 1, 193: 0}
    assert [most_results(256, 4096, drafts) for drafts in (0, 3)] == [256, 256 + 64 * 3]
    assert most_results(16, 4096, 3) == 64
    assert most_results(256, 300, 3) == 300


def test_none_without_a_drafter_and_in_lockstep() -> None:
    assert bounds([]).most == 0
    assert bounds([Bound("a", None, max_drafts=5)]).wanted(request(lockstep=object())) == 0


def test_recurrent_states_go_back_for_rejected_drafts() -> None:
    drafter, state = Bound("a", None, max_drafts=5), CacheGroup(GroupKind.STATE)
    assert bounds([drafter], groups=(state,)).rewinds
    assert not bounds([drafter]).rewinds
    assert not bounds([], groups=(state,)).rewinds


class Drafter(Bound):
    opt_in = True


class Plans(ToyDevice):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.drafts: list[int] = []

    def forward(self, plan: Any) -> Any:
        self.drafts += plan.num_drafts
        return super().forward(plan)


def test_nobody_is_preempted_for_drafts() -> None:
    """Two requests that just fit into the cache, both with as many drafts as there may be."""
    device = Plans(10)
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=24)
    scheduler = Scheduler(KVCache(10, BLOCK), limits, make_policy("fcfs"), hooks=[Drafter("a", None, max_drafts=7)])
    loop = EngineLoop(scheduler, device)
    tokens: dict[str, list[int]] = {}
    for i in range(2):
        params = SamplingParams(max_tokens=13, seed=i, ignore_eos=True)
        loop.add(GenerateRequest(id=str(i), tokens=[3 + i] * 7, params=params))
    while loop.busy:
        for delta in loop.step():
            tokens.setdefault(delta.id, []).extend(delta.tokens)
            assert not delta.num_preemptions
    assert tokens == {str(i): toy_generate([3 + i] * 7, 13, stop_ids=(), seed=i) for i in range(2)}
    assert max(device.drafts) == 7
