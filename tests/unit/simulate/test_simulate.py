"""Simulations against what can be counted by hand, and against each other."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.traces import Arrival
from octavo.schedule.limits import Limits
from octavo.schedule.policy import POLICIES
from octavo.simulate.run import SimulatedEngine, Simulation, simulate
from octavo.simulate.shape import StepShape


def seconds(shape: StepShape) -> float:
    """A step's time by its tokens alone, in powers of two, so that sums are exact."""
    return 1.0 + shape.tokens / 1024


def engine(**changes: Any) -> SimulatedEngine:
    own = {name: changes.pop(name) for name in ("num_blocks", "policy", "depth") if name in changes}
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "max_ahead": own.get("depth", 0) + 1,
    }
    return SimulatedEngine(limits=Limits(**limits | changes), **{"num_blocks": 128, "block_size": 4} | own)


def arrival(at: float = 0.0, prompt: int = 32, answer: int = 3, **more: Any) -> Arrival:
    return Arrival(at=at, prompt_tokens=prompt, output_tokens=answer, max_tokens=answer, **more)


def test_one_request_by_hand() -> None:
    found = simulate(engine(), [arrival(prompt=96)], seconds)
    (timing,) = found.timings
    prompt = [1 + 64 / 1024, 1 + 32 / 1024]  # two chunks
    assert timing.arrivals == [sum(prompt), sum(prompt) + 1 + 1 / 1024, sum(prompt) + 2 + 2 / 1024]
    assert timing.latency == found.duration == timing.arrivals[-1]
    assert (timing.output_tokens, found.stats.num_steps) == (3, 4)


def test_time_at_the_front_end_is_on_both_ways() -> None:
    (timing,) = simulate(engine(), [arrival(at=0.0)], seconds, front_end_s=0.5).timings
    (plain,) = simulate(engine(), [arrival(at=0.0)], seconds).timings
    assert [a - b for a, b in zip(timing.arrivals, plain.arrivals, strict=True)] == [0.5] * 3


def test_an_idle_engine_waits_for_the_next_request() -> None:
    found = simulate(engine(), [arrival(), arrival(at=100.0)], seconds)
    assert [timing.started for timing in found.timings] == [0.0, 100.0]
    assert found.timings[0].arrivals == found.timings[1].arrivals
    assert found.busy == pytest.approx(2 * found.timings[0].latency / found.duration)


def test_answers_that_end_by_themselves_are_as_long_as_in_the_trace() -> None:
    known = simulate(engine(), [arrival(answer=5)], seconds)
    early = dataclasses.replace(arrival(answer=5), max_tokens=200, stops=True)
    for depth in (0, 1):
        found = simulate(engine(depth=depth), [early, dataclasses.replace(early, max_tokens=None)], seconds)
        assert [timing.output_tokens for timing in found.timings] == [5, 5]
    assert simulate(engine(), [early], seconds).timings == known.timings


def test_a_device_that_computes_ahead_is_never_idle_between_steps() -> None:
    found = simulate(engine(depth=1), [arrival(answer=50)], seconds)
    assert found.busy == pytest.approx(1.0, abs=0.05)
    assert found.timings[0].output_tokens == 50


def test_prompts_that_begin_alike_are_computed_once() -> None:
    alike = [arrival(at=9.0 * number, prompt=40, blocks=[1, 2, 3 + number], block_size=16) for number in range(3)]
    found = simulate(engine(), alike, seconds)
    assert found.stats.prompt_tokens_cached == 2 * 32
    assert found.hit_rate == pytest.approx(64 / 120)
    assert simulate(engine(share_prefixes=False), alike, seconds).hit_rate == 0


def test_a_prompt_that_continues_an_answer_finds_it() -> None:
    turns = [
        Arrival(at=0, prompt_tokens=20, output_tokens=20, max_tokens=20, blocks=[1, 2], answer=[7, 8], block_size=10),
        Arrival(at=99, prompt_tokens=45, output_tokens=2, max_tokens=2, blocks=[1, 2, 7, 8, 9], block_size=10),
    ]
    assert simulate(engine(), turns, seconds).stats.prompt_tokens_cached == 36  # the last token's KV is never computed


def test_choices_share_their_prompt() -> None:
    found = simulate(engine(), [arrival(n=3)], seconds)
    assert found.timings[0].output_tokens == 9
    assert found.stats.prompt_tokens_computed < 3 * 32


def test_a_few_clients_send_one_request_after_the_other() -> None:
    found = simulate(engine(), [arrival() for _ in range(3)], seconds, max_concurrency=1)
    ends = [timing.started + timing.latency for timing in found.timings]
    assert [timing.started for timing in found.timings] == [0.0, *ends[:2]]


def test_what_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    found = simulate(engine(), [arrival(prompt=600), arrival()], seconds, max_concurrency=1)
    assert "512" in str(found.timings[0].error)
    assert found.timings[1].ok


def test_a_small_cache_preempts() -> None:
    many = [arrival(prompt=32, answer=60) for _ in range(4)]
    found = simulate(engine(num_blocks=50), many, seconds)
    assert found.stats.num_preemptions > 0
    assert found.kv_most > 0.9
    assert all(timing.output_tokens == 60 for timing in found.timings)


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            Arrival,
            at=st.floats(0, 30),
            prompt_tokens=st.integers(1, 90),
            output_tokens=st.integers(1, 30),
            max_tokens=st.none() | st.integers(30, 60),
            stops=st.just(True),
            n=st.integers(1, 2),
            priority=st.integers(0, 2),
            blocks=st.lists(st.integers(0, 3), max_size=4),
            block_size=st.sampled_from([4, 16]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 2),
    st.integers(60, 128),
)
def test_every_request_gets_its_answer_whatever_the_settings(
    arrivals: list[Arrival], policy: str, depth: int, num_blocks: int
) -> None:
    arrivals.sort(key=lambda one: one.at)

    def once() -> Simulation:
        one = engine(policy=policy, depth=depth, num_blocks=num_blocks, max_model_len=200)
        return simulate(one, arrivals, seconds)

    found = once()
    for timing, one in zip(found.timings, arrivals, strict=True):
        assert timing.error is None
        assert timing.output_tokens == one.n * one.output_tokens
        assert timing.arrivals == sorted(timing.arrivals)
        assert 0 < timing.arrivals[0] <= timing.latency
    assert once().timings == found.timings


def test_steps_of_a_load_are_counted_once() -> None:
    rng = random.Random(1)
    arrivals = [arrival(at=number * 2.0, prompt=rng.randint(4, 80), answer=rng.randint(1, 9)) for number in range(30)]
    found = simulate(engine(), arrivals, seconds)
    busy = found.stats.num_steps + found.stats.step_tokens / 1024
    assert found.busy * found.duration == pytest.approx(busy)
