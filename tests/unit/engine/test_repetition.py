"""Outputs that go in circles."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from octavo.cache.cache import KVCache
from octavo.core.output import FinishReason
from octavo.core.params import RepetitionDetection, SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.schedule.outputs import repeats
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler


@given(
    tokens=st.lists(st.integers(0, 2), max_size=24),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(2, 4),
    least=st.integers(0, 12),
    prompt=st.lists(st.integers(0, 2), max_size=6),
)
def test_as_by_definition(tokens: list[int], low: int, more: int, count: int, least: int, prompt: list[int]) -> None:
    rule = RepetitionDetection(min_pattern_size=low, max_pattern_size=low + more, min_count=count, min_tokens=least)
    plain = any(
        len(tokens) >= size * times and tokens[-size * times :] == tokens[-size:] * times
        for size in range(low, low + more + 1)
        for times in [max(count, math.ceil(least / size))]
    )
    assert repeats(prompt + tokens, rule, len(prompt)) == plain
    assert not plain or len(tokens) >= rule.least


def run(rule: RepetitionDetection | None) -> tuple[list[int], FinishReason | None]:
    """The tokens of one request to the toy device, and how it ended."""
    cache = KVCache(64, 4)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    scheduler = Scheduler(cache, limits, make_policy("fcfs"))
    loop = EngineLoop(scheduler, ToyDevice(64, 4))
    params = SamplingParams(max_tokens=200, seed=0, repetition_detection=rule)
    loop.add(GenerateRequest(id="a", tokens=[1, 2, 3], params=params))
    deltas = []
    while loop.busy:
        deltas += loop.step()
    return [token for delta in deltas for token in delta.tokens], deltas[-1].finish


def test_the_engine_ends_such_an_output() -> None:
    tokens, finish = run(RepetitionDetection(max_pattern_size=1, min_count=2))
    assert finish is FinishReason.REPETITION
    assert tokens[-1] == tokens[-2]
    assert all(a != b for a, b in itertools.pairwise(tokens[:-1]))


def test_the_tokens_before_the_end_are_the_same_and_the_end_is_where_the_rule_says() -> None:
    rule = RepetitionDetection(max_pattern_size=1, min_count=2, min_tokens=3)
    whole, _ = run(None)
    found, finish = run(rule)
    end = next((n for n in range(1, len(whole) + 1) if repeats(whole[:n], rule)), None)
    assert (found, finish is FinishReason.REPETITION) == (whole[:end], end is not None)
