"""Octavo beside vLLM on one GPU, in one run, one engine after the other: offline, over HTTP, and their starts.

    python benchmarks/gpu_peers --output result.json
    python benchmarks/gpu_peers --site ~/site --engines octavo vllm --lines chat decode --runs 3
    python benchmarks/gpu_peers --table result.json

Both engines have random weights of the model's shape, their own defaults, greedy requests of token ids, and ends of
sequence ignored. Octavo's offline lines run first come, first served, as vLLM's do; `chat` also runs with the longest
answers first, which knows from max_tokens how long each answer becomes.

An engine's caches are empty at first. Per engine: a server starts (exec to /health) and gets streamed requests at
several rates from a client that belongs to neither engine; the server starts again, its caches full; a process with
its `LLM` runs the offline lines, each once scaled down before it is timed. The result is written after every step, so
that a run that is cut off leaves what it has.

The peer is whatever `vllm` the interpreter imports, --site included: see docs/gpu-measurements.md for how to bring it
to a machine without network.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The engines' processes, the workers and the HTTP messages are those of the comparison on CPUs.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cpu_peers"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import model
import summary
from arrivals import Traffic
from contenders import CONTENDERS, Setup
from lines import LINES
from machine import describe, describe_gpu
from session import Plan, Session, ceilings, fresh_caches

HERE = Path(__file__).resolve().parent
ENGINES = ("octavo", "vllm")


def main() -> int:
    args = _arguments()
    if args.table:
        print(summary.table(json.loads(args.table.read_text(encoding="utf-8"))["engines"]))
        return 0
    # Engines are ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="gpu-peers-") as folder:
        return _compare(args, Path(folder))


def _compare(args: argparse.Namespace, folder: Path) -> int:
    setup = Setup(args.python, args.site, model.prepare(args.model, folder / "model"), args.device)
    traffic = [Traffic(rate, args.http_seconds, args.http_prompt, args.http_answer) for rate in args.rates]
    plan = Plan(args.lines, args.runs, traffic, args.http_runs, args.scale, not args.skip_warm_start)
    result: dict[str, Any] = {"benchmark": "gpu_peers", **describe(), "gpu": describe_gpu(), "model": args.model.name}
    result |= {"runs": args.runs, "scale": args.scale, "ceilings": {}, "engines": {}}
    began = time.perf_counter()

    def save(name: str, found: dict[str, Any]) -> None:
        result["engines"][name] = found
        result["seconds"] = round(time.perf_counter() - began, 1)
        result["summary"] = summary.summarize(result["engines"])
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    session = Session(setup, plan, args.logs, save)
    for engine in args.engines:
        caches = fresh_caches(folder, engine)
        if args.device == "cuda":
            result["ceilings"][f"before {engine}"] = ceilings(setup, fresh_caches(folder, "ceilings"))
            print(f"ceilings: {result['ceilings']}", flush=True)
        for contender in CONTENDERS.values():
            if contender.engine == engine:
                session.run(contender, caches)
    print("\n" + summary.table(result["engines"]))
    print(f"\nwritten to {args.output}")
    return 1 if any("failed" in found for found in result["engines"].values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--lines", nargs="*", choices=LINES, default=list(LINES), help="offline lines (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="of each offline line (default: 3)")
    parser.add_argument("--rates", nargs="*", type=float, default=[10, 20, 40], help="requests a second over HTTP")
    parser.add_argument("--http-runs", type=int, default=2, help="at each rate (default: 2)")
    parser.add_argument("--http-seconds", type=float, default=10, help="during which requests arrive (default: 10)")
    parser.add_argument("--http-prompt", type=int, default=256, help="tokens of each prompt over HTTP")
    parser.add_argument("--http-answer", type=int, default=128, help="tokens of each answer over HTTP")
    parser.add_argument("--skip-warm-start", action="store_true", help="start each server once only")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each line's requests, for a trial")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Octavo's; cpu for a trial")
    parser.add_argument("--model", type=Path, default=HERE.parent / "models" / "llama-3.1-8b", help="has config.json")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter that has torch")
    parser.add_argument("--site", type=Path, help="a folder of further packages, as pip install --target makes it")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "gpu-peers-logs")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "gpu_peers.json")
    parser.add_argument("--table", type=Path, metavar="RESULT", help="print the table of a result, and measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
