"""What `--scheduling-policy longest-first` gains or costs when max_tokens only bounds the length of an answer.

    python benchmarks/answer_order.py [--model DIR] [--cases exact equal ...] [--runs 2] [--scale 0.5] [--output FILE]

Requests have the prompts and the true answer lengths of the workload `chat`, random weights, and are handed over at
once. Each is aborted when its answer has its true length, as a stop token would end it; the scheduler sees max_tokens
alone. The cases differ in what max_tokens says:

    exact       the true length
    loose       anything from the true length to 1,024
    equal       1,024 for all
    unrelated   the true length of another request, or this one's if that is longer
    misleading  the shorter the answer, the larger: 2,048 less the true length
    traps       true lengths of 64; every tenth request allows 8,192, the others 128

Figures are the seconds until the last answer ends (what `LLM.generate` takes) and the mean until an answer ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from gpu_workloads import files_of
from machine import describe, describe_gpu

from octavo.bench.workloads import workload
from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop

HERE = Path(__file__).parent
LONGEST = 1024
POLICIES = ("fcfs", "longest-first")


class Ask(NamedTuple):
    """A request: what the scheduler is given, and where its answer really ends."""

    prompt: list[int]
    max_tokens: int
    true_tokens: int


def _bounded(bound: Callable[[list[int], int], int]) -> Callable[[list[int]], list[tuple[int, int]]]:
    return lambda true: [(bound(true, i), length) for i, length in enumerate(true)]


def _loose(true: list[int]) -> list[tuple[int, int]]:
    draw = random.Random("loose")
    return [(draw.randint(length, LONGEST), length) for length in true]


def _unrelated(true: list[int]) -> list[tuple[int, int]]:
    others = random.Random("unrelated").sample(true, len(true))
    return [(max(length, other), length) for length, other in zip(true, others, strict=True)]


# Case -> from true lengths to (max_tokens, true length) of each request.
CASES: dict[str, Callable[[list[int]], list[tuple[int, int]]]] = {
    "exact": _bounded(lambda true, i: true[i]),
    "loose": _loose,
    "equal": _bounded(lambda true, i: LONGEST),
    "unrelated": _unrelated,
    "misleading": _bounded(lambda true, i: 2 * LONGEST - true[i]),
    "traps": lambda true: [(8192 if i % 10 == 0 else 128, 64) for i in range(len(true))],
}


def asks(case: str, *, seed: int, vocab_size: int, scale: float) -> list[Ask]:
    """The requests of a case; lengths depend on the case and the scale alone."""
    works = workload("chat", seed=seed, vocab_size=vocab_size, scale=scale)
    lengths = CASES[case]([work.output_tokens for work in works])
    return [Ask(work.prompt, *pair) for work, pair in zip(works, lengths, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="share of chat's 1,000 requests")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "answer_order", **describe(), "gpu": describe_gpu(), "scale": args.scale}
    report |= {"seconds": {case: {} for case in args.cases}, "mean_end_s": {case: {} for case in args.cases}}
    for policy in args.policies:
        # A process each, which gives the device's memory back.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found = process.submit(measure_policy, policy, args).result()
        for case, runs in found.items():
            report["seconds"][case][policy] = [round(last, 3) for last, _ in runs]
            report["mean_end_s"][case][policy] = [round(mean, 3) for _, mean in runs]
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report, args.policies))


def measure_policy(policy: str, args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Case -> what `run` returns, for each run."""
    files = files_of(args.model)
    config = EngineConfig.of(
        load_format="dummy",
        device=args.device,
        max_model_len=min(16_384, files.config["max_position_embeddings"]),
        max_num_seqs=1024,
        scheduling_policy=policy,
    )
    loop, _ = build_core(config, files)
    gc.collect()
    gc.freeze()  # as the server does once it is ready
    vocab = files.config["vocab_size"]
    run(loop, asks("exact", seed=-1, vocab_size=vocab, scale=0.1 * args.scale))
    found = {}
    for case in args.cases:
        runs = range(args.runs)
        found[case] = [run(loop, asks(case, seed=seed, vocab_size=vocab, scale=args.scale)) for seed in runs]
        print(policy, case, found[case], flush=True)
    loop.close()
    return found


def run(loop: EngineLoop, work: list[Ask]) -> tuple[float, float]:
    """(Seconds until the last answer ends, mean until an answer ends)."""
    loop.forget_past()
    began = time.perf_counter()
    left: dict[str, int] = {}
    for number, ask in enumerate(work):
        request_id = f"{began}-{number}"
        params = SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False)
        loop.add(GenerateRequest(id=request_id, tokens=ask.prompt, params=params))
        left[request_id] = ask.true_tokens
    ends: list[float] = []
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            if delta.id not in left or not delta.tokens:
                continue
            left[delta.id] -= len(delta.tokens)
            if left[delta.id] <= 0:
                del left[delta.id]
                ends.append(time.perf_counter() - began)
                if delta.finish is None:
                    loop.abort(delta.id)
    if left:
        raise RuntimeError(f"{len(left)} answers ended before their true length")
    return ends[-1], statistics.fmean(ends)


def table(report: dict[str, Any], policies: list[str]) -> str:
    lines = [f"| max_tokens | {' | '.join(policies)} |", f"| --- |{' --- |' * len(policies)}"]
    for case, seconds in report["seconds"].items():
        means = report["mean_end_s"][case]
        cells = [f"{statistics.median(seconds[p]):.2f} s, mean {statistics.median(means[p]):.2f}" for p in policies]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
