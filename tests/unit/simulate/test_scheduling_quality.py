"""A gate: the scheduler's decisions for two fixed loads, with fixed step times, are as good as they were.

Figures are exact. If a change is meant, write the new ones with

    PYTHONPATH=. python tests/unit/simulate/test_scheduling_quality.py

and say in the commit why they are better.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.report import Summary
from octavo.bench.traces import Arrival
from octavo.schedule.limits import Limits
from octavo.schedule.policy import POLICIES
from octavo.simulate.run import SimulatedEngine, simulate
from octavo.simulate.shape import StepShape

FILE = Path(__file__).with_name("scheduling_quality.json")


def seconds(shape: StepShape) -> float:
    """About an 8B model on a large GPU: the weights are read, or more than 256 tokens multiplied."""
    return 0.004 + max(0, shape.tokens - 256) * 2e-5 + shape.keys * 3e-9 + shape.pairs * 1e-9


def chat() -> list[Arrival]:
    """Requests with a common first block, more than can run at once; some end before their `max_tokens`."""
    rng, at, found = random.Random(5), 0.0, []
    for number in range(160):
        at += rng.expovariate(250)
        prompt, answer = round(rng.lognormvariate(5, 0.9)) % 900 + 20, round(rng.lognormvariate(4, 0.8)) % 250 + 2
        most = None if number % 5 == 0 else 2 * answer
        blocks = [number % 4, 100 + number % 9, 1000 + number]
        found.append(
            Arrival(
                at=at,
                prompt_tokens=prompt,
                output_tokens=answer,
                max_tokens=most,
                stops=True,
                priority=number % 3,
                blocks=blocks,
                block_size=32,
            )
        )
    return found


def burst() -> list[Arrival]:
    """All at once, each with an answer of full length; the KV cache is too small for all that may run."""
    rng = random.Random(6)
    lengths = [(rng.randint(10, 700), rng.randint(5, 300)) for _ in range(60)]
    return [
        Arrival(at=0.0, prompt_tokens=prompt, output_tokens=answer, max_tokens=answer, priority=prompt % 3)
        for prompt, answer in lengths
    ]


LOADS = {"chat": (chat, 640), "burst": (burst, 420)}


def figures(load: str, policy: str) -> dict[str, Any]:
    make, num_blocks = LOADS[load]
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096, max_ahead=2, paced_tokens=256)
    engine = SimulatedEngine(limits=limits, num_blocks=num_blocks, block_size=16, policy=policy, depth=1)
    found = simulate(engine, make(), seconds)
    summary = Summary.of(found.timings, found.duration)
    assert not summary.failed
    shown = summary.figures(["ttft", "itl", "e2el"], [99])
    wanted = ("duration", "mean_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "mean_e2el_ms")
    return {name: round(shown[name], 3) for name in wanted} | {
        "steps": found.stats.num_steps,
        "preemptions": found.stats.num_preemptions,
        "cached_tokens": found.stats.prompt_tokens_cached,
    }


def everything() -> dict[str, dict[str, Any]]:
    return {f"{load}, {policy}": figures(load, policy) for load in LOADS for policy in sorted(POLICIES)}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("load", LOADS)
def test_the_scheduler_decides_as_well_as_before(load: str, policy: str) -> None:
    expected = json.loads(FILE.read_text())
    assert figures(load, policy) == pytest.approx(expected[f"{load}, {policy}"], rel=1e-9), (
        f"scheduling has changed; if it is meant: PYTHONPATH=. python {Path(__file__).name}"
    )


if __name__ == "__main__":
    FILE.write_text(json.dumps(everything(), indent=1) + "\n")
