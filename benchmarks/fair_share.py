"""What `--scheduling-policy fair` gives a light tenant beside a heavy one, and what shortest-first gains in latency.

    python benchmarks/fair_share.py [--model smollm2] [--runs 2] [--seconds 8] [--output FILE]

The engine runs in this process with one thread; arrivals are taken in between its steps, as a server's core does. The
clock is the process's CPU time, so that other work on the machine changes little: seconds are those of one free core.

    tenants  A heavy tenant keeps 64 requests (prompts of 32 tokens, answers of 24) with an engine that runs 16 at once.
             A light one sends a request (32 and 8 tokens) every second. Time to first token of the light one, and
             computed tokens per second of both until the last light request was sent.
    long     The same, but the heavy tenant keeps 20 requests, whose answers have 100 tokens.
    mixed    64 requests at once, answers of 8 to 128 tokens, 16 at once. Mean seconds until an answer ends, where
             max_tokens is the answer's length (exact), or anything from there to 128 (loose).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from machine import Report, describe

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.hub.resolve import resolve

SLOTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--parts", nargs="*", default=["tenants", "long", "mixed"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    facts = {
        "benchmark": "fair_share",
        **describe(),
        "model": args.model,
        "slots": SLOTS,
        "clock": "CPU time of one thread",
        "seconds": args.seconds,
    }
    report = Report(facts, args.output)
    loops: dict[str, EngineLoop] = {}

    def loop_of(policy: str) -> EngineLoop:
        if policy not in loops:
            loops[policy] = engine(args.model, policy)
        return loops[policy]

    for name, keep, answer in (("tenants", 64, 24), ("long", 20, 100)):
        if name in args.parts:
            measure = partial(tenants, keep=keep, answer=answer, seconds=args.seconds)
            in_turns(report, name, ("fcfs", "fair"), args.runs, lambda policy, one=measure: one(loop_of(policy)))
    for case in ("exact", "loose") if "mixed" in args.parts else ():
        measure = partial(mixed, case=case)
        name, policies = f"mixed, {case}", ("fcfs", "shortest-first")
        in_turns(report, name, policies, args.runs, lambda policy, one=measure: one(loop_of(policy)))


def engine(model: str, policy: str) -> EngineLoop:
    config = EngineConfig.of(device="cpu", threads=1, max_num_seqs=SLOTS, max_model_len=1024, scheduling_policy=policy)
    loop, _ = build_core(config, resolve(model))
    return loop


def in_turns(
    report: Report, name: str, policies: tuple[str, ...], runs: int, measure: Callable[[str], dict[str, float]]
) -> None:
    """Note policy -> figure -> its value in each run."""
    found: dict[str, dict[str, list[float]]] = {policy: {} for policy in policies}
    for run in range(runs):
        for policy in policies if run % 2 == 0 else policies[::-1]:
            for figure, value in measure(policy).items():
                found[policy].setdefault(figure, []).append(value)
            report.note(name, found)


def tenants(loop: EngineLoop, keep: int, answer: int, seconds: float) -> dict[str, float]:
    """Run a heavy and a light tenant for some seconds, and the light one's requests to their end."""
    loop.forget_past()
    heavy, light = prompts(32, seed=1), prompts(32, seed=2)
    began = time.process_time()
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    alive, number, generated = 0, 0, {"heavy": 0, "light": 0}
    while time.process_time() - began < seconds or len(first) < len(sent):
        now = time.process_time() - began
        while alive < keep:
            alive, number = alive + 1, number + 1
            loop.add(request(f"heavy-{began}-{number}", next(heavy), answer, "heavy"))
        if now < seconds and len(sent) <= now:
            name = f"light-{began}-{len(sent)}"
            sent[name] = now
            loop.add(request(name, next(light), 8, "light"))
        for delta in loop.step():
            tenant = delta.id.partition("-")[0]
            now = time.process_time() - began
            if now <= seconds:
                generated[tenant] += len(delta.tokens)
            if tenant == "light" and delta.tokens:
                first.setdefault(delta.id, now)
            alive -= tenant == "heavy" and delta.finish is not None
    after = msgspec.structs.replace(loop.stats())
    whole = time.process_time() - began
    loop.abort(None)
    while loop.busy:
        loop.step()
    waits = sorted(first[name] - sent[name] for name in sent)
    return {
        "ttft_median_s": round(statistics.median(waits), 3),
        "ttft_p90_s": round(waits[int(0.9 * len(waits))], 3),
        "ttft_max_s": round(waits[-1], 3),
        "heavy_output_tokens_per_s": round(generated["heavy"] / seconds, 1),
        "light_output_tokens_per_s": round(generated["light"] / seconds, 1),
        "step_tokens_per_s": round(after.step_tokens / whole, 1),
        "preemptions": after.num_preemptions,
        "recomputed_tokens": after.recomputed_tokens,
    }


def mixed(loop: EngineLoop, case: str) -> dict[str, float]:
    """Run requests of many lengths, each to its true length; see the module."""
    loop.forget_past()
    rng, source = random.Random(3), prompts(32, seed=3)
    true = [round(8 * 16 ** rng.random()) for _ in range(64)]
    began = time.process_time()
    left = {}
    for number, length in enumerate(true):
        name = f"mixed-{began}-{number}"
        left[name] = length
        loop.add(request(name, next(source), length if case == "exact" else rng.randint(length, 128), ""))
    ends = []
    while left:
        for delta in loop.step():
            if delta.id in left:
                left[delta.id] -= len(delta.tokens)
                if left[delta.id] <= 0:
                    ends.append(time.process_time() - began)
                    del left[delta.id]
                    if delta.finish is None:
                        loop.abort(delta.id)
    while loop.busy:
        loop.step()
    return {"mean_s": round(statistics.fmean(ends), 2), "last_s": round(ends[-1], 2)}


def request(name: str, tokens: list[int], max_tokens: int, tenant: str) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    return GenerateRequest(id=name, tokens=tokens, params=params, tenant=tenant)


def prompts(length: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(1000, 40_000) for _ in range(length)]


if __name__ == "__main__":
    main()
