"""Processor seconds that each weight format takes on one thread: what can be compared on a machine that others load.

    python benchmarks/cpu_seconds.py
    python benchmarks/cpu_seconds.py --cpu-isa avx2 --formats int16 int8 --rounds 5

Two workloads (greedy, end-of-sequence ignored, prompts new every time), in seconds of this process in user mode:
    one    1 request,  32 tokens in, 48 out
    many  16 requests, 64 in, 32 out

A thread that waits for its core costs nothing here, so other processes disturb this much less than a time on the clock.
They do share the memory and the third-level cache, and tokens per second on idle cores do not follow: cpu_workloads.py
measures those.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path
from typing import Any

from cpu_workloads import FORMATS, RESULTS, Requests, fixed
from machine import describe

from octavo import LLM
from octavo.native.isa import NAMES

WORKLOADS = {"one": (1, 32, 48), "many": (16, 64, 32)}
"""Requests, and tokens in and out of each."""


def seconds_for(llm: LLM, requests: Requests, workload: str) -> float:
    count, prompt, output = WORKLOADS[workload]
    prompts = [requests.prompt(prompt) for _ in range(count)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    llm.generate(prompts, fixed(output))  # type: ignore[arg-type]  # lists of token ids
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cpu-isa", choices=("auto", *NAMES), default="auto")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "int16", "int8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_seconds.json")
    args = parser.parse_args()

    engines = {
        name: LLM(
            args.model,
            threads=1,
            cpu_isa=args.cpu_isa,
            kv_cache_memory_bytes=1 << 28,
            spec_method="none",
            **FORMATS[name],
        )
        for name in args.formats
    }
    first = next(iter(engines.values())).info
    result: dict[str, Any] = {"benchmark": "cpu_seconds", **describe(), "kernels": first.kernels}
    requests = Requests(args.seed, first.vocab_size)
    for llm in engines.values():
        seconds_for(llm, requests, "one")
    runs: dict[str, dict[str, list[float]]] = {w: {f: [] for f in args.formats} for w in WORKLOADS}
    for _ in range(args.rounds):
        for workload, of in runs.items():
            for name, llm in engines.items():
                of[name].append(round(seconds_for(llm, requests, workload), 3))
            print(workload, {name: values[-1] for name, values in of.items()}, flush=True)
    for llm in engines.values():
        llm.close()
    result["runs"] = runs
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
