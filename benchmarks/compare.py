"""The six workloads on several engines of one machine, one after the other, in one run.

    python benchmarks/compare.py --engines octavo vllm sglang http://localhost:8000 [--model DIR] [--output FILE]

`octavo`, `vllm` and `sglang` run in a process each, with random weights of the shape that the folder's config.json has
and with their own defaults; the last two where they can be imported. A URL is that of any server with OpenAI's API: its
model should have the same shape, and be asked for with random tokens too. Greedy, end-of-sequence ignored, everything
handed over at once; each workload runs once, scaled down, before it is timed. Figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import describe

from octavo.bench.client import Target
from octavo.bench.load import Pace, first_model, run_load
from octavo.bench.samples import Sample
from octavo.bench.workloads import WORKLOADS, Work, workload

HERE = Path(__file__).parent
MAX_MODEL_LEN = 16384
Run = Callable[[list[Work]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["octavo", "vllm", "sglang"], help="names, or URLs of servers")
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload's requests")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", choices=["octavo", "vllm", "sglang"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        with IN_PROCESS[args.child](args.model) as run:
            print(json.dumps(measure(run, args)), flush=True)
        return
    report: dict[str, Any] = {"machine": describe(), "engines": {}}
    for engine in args.engines:
        if "://" in engine:
            report["engines"][engine] = measure(over_http(engine.rstrip("/")), args)
        elif engine != "octavo" and importlib.util.find_spec(engine) is None:
            print(f"{engine} is not installed here and left out", file=sys.stderr)
        else:
            report["engines"][engine] = in_child(engine)
    print(table(report["engines"], args.workloads))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def measure(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Workload -> its median seconds and rates."""
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    found = {}
    for name in args.workloads:
        run(workload(name, seed=-1, vocab_size=vocab, scale=0.1 * args.scale))
        seconds = []
        for seed in range(args.runs):
            work = workload(name, seed=seed, vocab_size=vocab, scale=args.scale)
            began = time.perf_counter()
            run(work)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds)
        found[name] = {
            "seconds": round(median, 4),
            "output_tok_s": round(sum(each.output_tokens for each in work) / median, 1),
            "input_tok_s": round(sum(len(each.prompt) for each in work) / median, 1),
            "all_seconds": [round(each, 4) for each in seconds],
        }
    return found


def in_child(engine: str) -> dict[str, Any]:
    """Its figures, from a process of its own, which gives the memory back; the last line it prints is JSON."""
    done = subprocess.run([sys.executable, *sys.argv, "--child", engine], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextmanager
def octavo_engine(model: Path) -> Iterator[Run]:
    import gc

    from gpu_workloads import files_of
    from gpu_workloads import measure as run_work

    from octavo.build import build_core
    from octavo.config import EngineConfig

    length = min(MAX_MODEL_LEN, json.loads((model / "config.json").read_text())["max_position_embeddings"])
    loop, _ = build_core(EngineConfig.of(load_format="dummy", max_model_len=length), files_of(model))
    gc.collect()
    gc.freeze()  # as the server does once it is ready
    yield lambda work: (run_work(loop, work, False), None)[1]
    loop.close()


@contextmanager
def vllm_engine(model: Path) -> Iterator[Run]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model=str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)

    def run(work: list[Work]) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=each.output_tokens, ignore_eos=True, detokenize=False)
            for each in work
        ]
        llm.generate([{"prompt_token_ids": each.prompt} for each in work], params, use_tqdm=False)

    yield run


@contextmanager
def sglang_engine(model: Path) -> Iterator[Run]:
    import sglang  # type: ignore[import-not-found]

    engine = sglang.Engine(model_path=str(model), load_format="dummy", skip_tokenizer_init=True)

    def run(work: list[Work]) -> None:
        params = [{"temperature": 0, "max_new_tokens": each.output_tokens, "ignore_eos": True} for each in work]
        engine.generate(input_ids=[each.prompt for each in work], sampling_params=params)

    yield run
    engine.shutdown()


IN_PROCESS = {"octavo": octavo_engine, "vllm": vllm_engine, "sglang": sglang_engine}


def over_http(base_url: str) -> Run:
    """Streams from a server; a request that fails ends the run."""
    model = asyncio.run(first_model(base_url, {}))
    body = {"temperature": 0, "ignore_eos": True}
    target = Target(base_url=base_url, endpoint="/v1/completions", model=model, body=body, headers={})

    def run(work: list[Work]) -> None:
        samples = [Sample(each.prompt, len(each.prompt), each.output_tokens) for each in work]
        timings, _ = asyncio.run(run_load(target, samples, Pace()))
        failed = [timing.error for timing in timings if not timing.ok]
        if failed:
            raise SystemExit(f"{base_url}: {len(failed)} of {len(timings)} requests failed: {failed[0]}")

    return run


def table(engines: dict[str, dict[str, Any]], workloads: list[str]) -> str:
    """Markdown: output tokens a second; for prefill, input tokens a second."""
    lines = ["| workload | " + " | ".join(engines) + " |", "| --- |" + " --- |" * len(engines)]
    for name in workloads:
        kind = "input_tok_s" if name == "prefill" else "output_tok_s"
        lines.append(f"| {name} | " + " | ".join(f"{found[name][kind]:,}" for found in engines.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
