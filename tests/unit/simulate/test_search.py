"""Goals, and a search whose best settings are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest

from octavo.bench.report import Summary
from octavo.bench.timing import Timing
from octavo.bench.traces import Arrival
from octavo.core.errors import ConfigError
from octavo.schedule.limits import Limits
from octavo.simulate.goals import Goal, missed, parse_goal
from octavo.simulate.run import SimulatedEngine, Simulation, simulate
from octavo.simulate.search import Search, Settings, Trial
from octavo.simulate.shape import StepShape


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("ttft p99 < 500ms", Goal("ttft", 99, 500)),
        (" ITL  p99.9<=0.05 s", Goal("itl", 99.9, 50)),
        ("tpot mean < 40ms", Goal("tpot", None, 40)),
        ("e2e median < 3s", Goal("e2el", 50, 3000)),
    ],
)
def test_goals_are_read(text: str, goal: Goal) -> None:
    assert parse_goal(text) == goal


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft p99 500ms", "speed p99 < 1s", "ttft p101 < 1s", "itl mean < 0ms", "itl p9 < 5"]
)
def test_other_goals_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goal"):
        parse_goal(text)


def summary(*ttfts: float, failed: int = 0) -> Summary:
    timings = [Timing(1, 1, arrivals=[ttft], latency=ttft) for ttft in ttfts]
    return Summary.of([*timings, *(Timing(1, error="no") for _ in range(failed))], 1.0)


def test_what_a_goal_is_missed_by() -> None:
    goals = [Goal("ttft", None, 100), Goal("ttft", 100, 1000)]
    assert missed(goals, summary(0.1, 0.3)) == pytest.approx(1.0)
    assert missed(goals, summary(0.1, 0.1)) == 0
    assert missed(goals, summary(0.1, failed=1)) == math.inf
    assert Goal("itl", 99, 5).missed(summary(0.1)) == 0  # answers of one token have no gaps


def seconds(shape: StepShape) -> float:
    return 0.01 + shape.tokens * 0.001


def make(settings: Settings) -> SimulatedEngine:
    tokens = settings["tokens"]
    assert isinstance(tokens, int)
    if tokens > 1000:
        raise ConfigError("too many")
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=tokens, max_model_len=2048)
    return SimulatedEngine(limits=limits, num_blocks=1024, block_size=16, policy=str(settings["policy"]))


def run(engine: SimulatedEngine, arrivals: Sequence[Arrival]) -> Simulation:
    return simulate(engine, arrivals, seconds)


LOAD = [
    Arrival(at=number * 0.5, prompt_tokens=800 if number % 3 else 20, output_tokens=20, max_tokens=20)
    for number in range(30)
]


def search(goal: str) -> Search:
    return Search(make, run, LOAD, [parse_goal(goal)])


def changes(settings: Settings) -> Iterator[Settings]:
    for tokens in (16, 64, 256, 4096):
        yield {"tokens": tokens}
    for policy in ("fcfs", "shortest-first"):
        yield {"policy": policy}


def test_a_limit_of_gaps_needs_small_steps() -> None:
    found = search("itl p99 < 80ms")
    best = found.best({"tokens": 1000, "policy": "fcfs"}, changes)
    assert best.settings["tokens"] == 64
    assert not best.missed
    before = found.trial({"tokens": 1000, "policy": "fcfs"})
    assert before is not None
    assert before.missed > 1
    assert found.trial({"tokens": 4096, "policy": "fcfs"}) is None
    assert found.capacity(best.settings) > 1 > found.capacity(before.settings)


def test_without_a_limit_that_binds_the_latency_decides() -> None:
    found = search("ttft p99 < 1000s")
    best = found.best({"tokens": 16, "policy": "fcfs"}, changes)
    trials = [trial for trial in found.trials.values() if trial is not None]
    assert best.latency == min(trial.latency for trial in trials)


def test_the_front_is_what_nothing_is_better_than() -> None:
    found = search("itl p99 < 80ms")
    found.best({"tokens": 1000, "policy": "fcfs"}, changes)
    front, trials = found.front(), [trial for trial in found.trials.values() if trial is not None]

    def better(one: Trial, two: Trial) -> bool:
        mine, theirs = ((*t.values, t.latency, -t.throughput) for t in (one, two))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    assert len(front) >= 2
    assert not any(better(other, trial) for trial in front for other in trials)
    for trial in trials:
        assert trial in front or any(better(other, trial) or other.values == trial.values for other in front)


def test_settings_that_do_not_fit_to_start_with_are_an_error() -> None:
    with pytest.raises(ConfigError, match="too many"):
        search("ttft p99 < 1s").best({"tokens": 4096, "policy": "fcfs"}, changes)


def test_goals_that_are_never_kept_have_no_capacity() -> None:
    assert search("ttft p99 < 1ms").capacity({"tokens": 64, "policy": "fcfs"}) == 0
