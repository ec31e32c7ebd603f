"""The longest answers begin first, and prompts of shorter ones ride along with decodes and make nothing longer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.cache import KVCache
from octavo.core.params import SamplingParams
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.schedule.limits import Limits
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Scheduler

BLOCK = 4
STEP = 256


class Recorder(ToyDevice):
    """Notes how many tokens each step computed."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.steps: list[int] = []

    def forward(self, plan):
        self.steps.append(sum(plan.num_tokens))
        return super().forward(plan)


def run(
    work: list[tuple[int, int]],
    *,
    paced: int,
    policy: str = "longest-first",
    depth: int = 0,
    seqs: int = 64,
    ends: list[int] | None = None,
):
    """The tokens of each step, and the requests in the order of their first tokens; `work` is (prompt, max_tokens).

    `ends` has the true lengths of answers that max_tokens only bounds: each is aborted there, as a stop token would.
    """
    blocks = sum(-(-(prompt + answer) // BLOCK) for prompt, answer in work) + 1
    limits = Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=STEP,
        max_model_len=512,
        max_ahead=depth + 1,
        share_prefixes=False,
        paced_tokens=paced,
    )
    device = Recorder(blocks)
    loop = EngineLoop(Scheduler(KVCache(blocks, BLOCK), limits, make_policy(policy)), device, depth)
    for number, (prompt, answer) in enumerate(work):
        params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=number)
        loop.add(GenerateRequest(id=str(number), tokens=[1] * prompt, params=params))
    begun: list[str] = []
    left = dict(enumerate(ends or []))
    while loop.busy:
        for delta in loop.step():
            if delta.tokens and delta.id not in begun:
                begun.append(delta.id)
            if (number := int(delta.id)) in left:
                left[number] -= len(delta.tokens)
                if left[number] <= 0:
                    del left[number]
                    loop.abort(delta.id)
    return device.steps, begun


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_fill_the_steps_of_the_longest_answer(depth):
    work = [(20, 4)] * 10 + [(20, 100)]
    steps, begun = run(work, paced=16, depth=depth)
    assert begun[0] == "10"
    assert steps[0] == 20  # what must begin now is not cut
    assert max(steps[1:]) == 16
    assert len(steps) == 100
    assert sum(steps) == sum(prompt + answer - 1 for prompt, answer in work)


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_of_one_length_all_begin_at_once(depth):
    work = [(20, 8)] * 10
    assert run(work, paced=16, depth=depth) == run(work, paced=0, policy="fcfs", depth=depth)


@pytest.mark.parametrize("depth", [0, 1])
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), seqs=st.integers(1, 64))
@settings(max_examples=30, deadline=None)
def test_equal_bounds_on_answers_of_any_length_change_nothing(depth: int, lengths: list[int], seqs: int) -> None:
    """Equal max_tokens tell nothing, and the steps are those of first come, first served."""
    work = [(20, 60)] * len(lengths)
    mine = run(work, paced=16, depth=depth, seqs=seqs, ends=lengths)
    assert mine == run(work, paced=0, policy="fcfs", depth=depth, seqs=seqs, ends=lengths)


def test_a_prompt_waits_no_longer_than_it_can():
    """Where the paced steps do not get through all prompts in time, the rest is computed when it is due."""
    steps, _ = run([(200, 30), (200, 20), (1, 40)], paced=2)
    assert len(steps) == 40
    assert max(steps) > 150


work_lists = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=24)


@given(work_lists, st.sampled_from([1, 8, 32]), st.integers(0, 1))
@settings(max_examples=150, deadline=None)
def test_waiting_takes_no_more_steps_than_not_waiting(work, paced, depth):
    """But for a step or two in which a due prompt is cut by the step's limit."""
    waiting, _ = run(work, paced=paced, depth=depth)
    at_once, _ = run(work, paced=0, depth=depth)
    assert len(waiting) <= len(at_once) + sum(prompt for prompt, _ in work) // (STEP - len(work)) + 1


def test_background_work_does_not_pass_for_being_long():
    requests = [
        GenerateRequest(id="a", tokens=[1], params=SamplingParams(max_tokens=500), priority=BACKGROUND),
        GenerateRequest(id="b", tokens=[1], params=SamplingParams(max_tokens=5)),
    ]
    scheduler = Scheduler(
        KVCache(200, BLOCK),
        Limits(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=512),
        make_policy("longest-first"),
    )
    for request in requests:
        scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.new[0].params.max_tokens == 5
