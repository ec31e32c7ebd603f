"""Octavo's speed on a CPU over five workloads and several weight formats, beside the machine's own limits.

    python benchmarks/cpu_workloads.py
    python benchmarks/cpu_workloads.py --formats int16 bfloat16 --workloads A B --rounds 5

Workloads (greedy, end-of-sequence ignored, prompts new every time):
    A   1 request,   32 tokens in, 256 out               output tokens/s after the first
    B  16 requests, 128 in, 128 out                      output tokens/s
    C  64 requests,  32..512 in, 16..256 out             output tokens/s
    D   1 request, 2,048 in, 1 out                       input tokens/s
    E  32 requests, 1,024 shared + 32 of their own, 16 out   seconds

Formats: float32 and bfloat16 (weights converted), int16 and int8 (weights as they are stored, times activations of so
many bits), and unpacked (weights as they are stored, times activations in bfloat16). All engines are loaded at once and
take turns, so that a busy moment of the machine hits them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe

from octavo import LLM, SamplingParams

RESULTS = Path(__file__).resolve().parent / "results"
LIMITS = Path(__file__).resolve().parent / "cpu_peers" / "limits.py"
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int16": {"activation_dtype": "int16"},
    "int8": {"activation_dtype": "int8"},
    "unpacked": {"activation_dtype": "bfloat16"},
}


class Requests:
    """Random prompts from a seed."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._rng = random.Random(seed)
        self._vocab = range(1000, vocab_size - 1000)

    def prompt(self, length: int) -> list[int]:
        return self._rng.choices(self._vocab, k=length)

    def lengths(self, low: int, high: int, count: int) -> list[int]:
        return [self._rng.randint(low, high) for _ in range(count)]


def fixed(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def seconds_for(llm: LLM, prompts: list[list[int]], counts: list[int]) -> float:
    started = time.perf_counter()
    outputs = llm.generate(prompts, [fixed(count) for count in counts])  # type: ignore[arg-type]  # lists of token ids
    seconds = time.perf_counter() - started
    produced = [len(output.outputs[0].token_ids) for output in outputs]
    if produced != counts:
        raise AssertionError(f"asked for {counts} tokens, got {produced}")
    return seconds


def single(llm: LLM, requests: Requests) -> float:
    stream = llm.stream(requests.prompt(32), fixed(256))
    next(stream)
    started = time.perf_counter()
    for _ in stream:
        pass
    return 255 / (time.perf_counter() - started)


def batch(llm: LLM, requests: Requests) -> float:
    return 16 * 128 / seconds_for(llm, [requests.prompt(128) for _ in range(16)], [128] * 16)


def mixed(llm: LLM, requests: Requests) -> float:
    prompts = [requests.prompt(length) for length in requests.lengths(32, 512, 64)]
    counts = requests.lengths(16, 256, 64)
    return sum(counts) / seconds_for(llm, prompts, counts)


def long_prompt(llm: LLM, requests: Requests) -> float:
    return 2048 / seconds_for(llm, [requests.prompt(2048)], [1])


def shared_prefix(llm: LLM, requests: Requests) -> float:
    head = requests.prompt(1024)
    return seconds_for(llm, [head + requests.prompt(32) for _ in range(32)], [16] * 32)


WORKLOADS: dict[str, Callable[[LLM, Requests], float]] = {
    "A": single,
    "B": batch,
    "C": mixed,
    "D": long_prompt,
    "E": shared_prefix,
}


def limits(threads: int) -> dict[str, float]:
    """What the machine can do at all, as cpu_peers measures it: a process of its own, on as many cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    command = [sys.executable, str(LIMITS), *map(str, cores)]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", action="store_true", help="also an engine of each format that drafts (method auto)")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_workloads.json")
    args = parser.parse_args()

    result: dict[str, Any] = {"benchmark": "cpu_workloads", **describe(), "threads": args.threads}
    result["limits"] = limits(args.threads)
    print(json.dumps(result["limits"]), flush=True)
    settings: dict[str, dict[str, Any]] = {name: FORMATS[name] | {"spec_method": "none"} for name in args.formats}
    if args.drafts:
        settings |= {f"{name}, drafts": FORMATS[name] | {"spec_method": "auto"} for name in args.formats}
    engines = {
        name: LLM(args.model, threads=args.threads, kv_cache_memory_bytes=1 << 30, **own)
        for name, own in settings.items()
    }
    result["weights_mb"] = {name: round(llm.info.memory["weights"] / 1e6, 1) for name, llm in engines.items()}
    requests = Requests(args.seed, next(iter(engines.values())).info.vocab_size)
    runs: dict[str, dict[str, list[float]]] = {w: {name: [] for name in engines} for w in args.workloads}
    for _ in range(args.rounds):
        for workload in args.workloads:
            for name, llm in engines.items():
                runs[workload][name].append(round(WORKLOADS[workload](llm, requests), 2))
            print(workload, {name: values[-1] for name, values in runs[workload].items()}, flush=True)
    for llm in engines.values():
        llm.close()
    result["runs"] = runs
    result["medians"] = {w: {name: statistics.median(v) for name, v in of.items()} for w, of in runs.items()}
    print(json.dumps(result["medians"], indent=1))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
