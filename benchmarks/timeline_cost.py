"""What timelines cost the scheduler: CPU time with and without them, on an engine that computes nothing.

    python benchmarks/timeline_cost.py [--runs 7] [--output FILE]

Microseconds for each admitted prompt of about 2,100 tokens, by what the prefix cache has of it, and for each step of
256 requests that decode, whose start and end are included. Runs alternate; the least of each is reported.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.cache.cache import KVCache
from octavo.core.output import StepOutput
from octavo.core.params import SamplingParams
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.timeline.engine import TimelineEngine
from octavo.features.timeline.watch import Timeline
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler

PROMPTS = 300
VOCAB = 50_000
MODES = ("new", "hit", "diverged", "evicting", "evicted")


class NoStep:
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def result(self) -> StepOutput:
        return StepOutput(tokens=[[7] if samples else [] for samples in self.plan.samples])


class NoDevice:
    """Samples the same token always."""

    def forward(self, plan: StepPlan) -> NoStep:
        return NoStep(plan)

    def sample(self, step: NoStep, payload: dict[str, Any]) -> None:
        """Nothing to do."""

    def watch(self, spans: Any) -> None:
        """Nothing to watch."""


def make_loop(num_blocks: int, *, timelines: bool) -> EngineLoop:
    hooks = [TimelineEngine(Timeline(1024))] if timelines else []
    limits = Limits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)
    scheduler = Scheduler(KVCache(num_blocks, 16), limits, make_policy("fcfs"), hooks=hooks)
    return EngineLoop(scheduler, NoDevice())


def run(loop: EngineLoop, prompts: list[list[int]], max_tokens: int) -> tuple[int, float]:
    """Return the number of steps, and the CPU seconds."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        loop.add(GenerateRequest(id=str(number), tokens=prompt, params=params))
    gc.collect()
    gc.disable()  # an engine core collects when it is idle
    steps, began = 0, time.process_time()
    while loop.busy:
        loop.step()
        steps += 1
    seconds = time.process_time() - began
    gc.enable()
    return steps, seconds


def admission_us(mode: str, *, timelines: bool) -> float:
    rng = random.Random(2)

    def words(count: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(count)]

    base, rounds = words(2048), [words(2100) for _ in range(40)]
    make: dict[str, Callable[[int], list[int]]] = {
        "new": lambda n: words(2100),
        "hit": lambda n: base + words(64),
        "diverged": lambda n: base[:1000] + words(1100),
        "evicting": lambda n: words(2100),
        "evicted": lambda n: rounds[n % len(rounds)],
    }
    loop = make_loop(4_000 if mode.startswith("evict") else 100_000, timelines=timelines)
    _, seconds = run(loop, [make[mode](number) for number in range(PROMPTS)], 1)
    return seconds / PROMPTS * 1e6


def decode_us(tokens: int, *, timelines: bool) -> float:
    rng = random.Random(1)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(64)] for _ in range(256)]
    steps, seconds = run(make_loop(40_000, timelines=timelines), prompts, tokens)
    return seconds / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what timelines cost the scheduler.")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cases: dict[str, Callable[..., float]] = {
        f"prompt: {mode}": lambda mode=mode, **how: admission_us(mode, **how) for mode in MODES
    } | {f"step, {count} tokens": lambda count=count, **how: decode_us(count, **how) for count in (400, 1600)}
    found = {}
    for name, measure in cases.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(args.runs):
            for timelines in (False, True) if number % 2 else (True, False):
                times[timelines].append(measure(timelines=timelines))
        found[name] = {"without_us": round(min(times[False]), 1), "with_us": round(min(times[True]), 1)}
        print(f"{name:22} {found[name]['without_us']:8.1f} us without, {found[name]['with_us']:8.1f} us with timelines")
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
