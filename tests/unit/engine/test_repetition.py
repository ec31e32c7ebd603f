"""Outputs that go in circles."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from octavo.cache.cache import KVCache
from octavo.core.output import FinishReason
from octavo.core.params import RepetitionDetection, SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.schedule.endings import repeats
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler


@given(
    tokens=st.lists(st.integers(0, 2), max_size=24),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(2, 4),
)
def test_as_by_definition(tokens: list[int], low: int, more: int, count: int) -> None:
    rule = RepetitionDetection(min_pattern_size=low, max_pattern_size=low + more, min_count=count)
    plain = any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(low, low + more + 1)
    )
    assert repeats(tokens, rule) == plain


def test_the_engine_ends_such_an_output() -> None:
    cache = KVCache(64, 4)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    scheduler = Scheduler(cache, limits, make_policy("fcfs"))
    loop = EngineLoop(scheduler, ToyDevice(64, 4))
    rule = RepetitionDetection(max_pattern_size=1, min_count=2)
    params = SamplingParams(max_tokens=200, seed=0, repetition_detection=rule)
    loop.add(GenerateRequest(id="a", tokens=[1, 2, 3], params=params))
    deltas = []
    while loop.busy:
        deltas += loop.step()
    tokens = [token for delta in deltas for token in delta.tokens]
    assert deltas[-1].finish is FinishReason.REPETITION
    assert tokens[-1] == tokens[-2]
    assert all(a != b for a, b in itertools.pairwise(tokens[:-1]))
