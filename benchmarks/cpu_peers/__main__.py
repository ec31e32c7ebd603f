"""Octavo on a CPU beside its peers: llama.cpp's server, vLLM and OpenVINO GenAI, in one run, taking turns.

    python benchmarks/cpu_peers --setup-only
    python benchmarks/cpu_peers
    python benchmarks/cpu_peers --engines octavo llama.cpp --workloads A B --rounds 5 --groups http-16bit
    python benchmarks/cpu_peers --engines octavo --earlier ../octavo-v1 --output before_after.json

The first run puts each peer into an environment of its own under --cache (llama.cpp is compiled there), and writes the
model in every format. A peer that can't be had is named and left out.

Workloads (greedy, end-of-sequence ignored, prompts new in every round and the same for all engines):
    A   1 request,   32 tokens in, 256 out               output tokens/s after the first
    B  16 requests, 128 in, 128 out                      output tokens/s
    C  64 requests,  32..512 in, 16..256 out             output tokens/s
    D   1 request, 2,048 in, 1 out                       input tokens/s
    E  32 requests, 1,024 shared + 32 of their own, 16 out   seconds

Engines are compared in groups: over HTTP (streamed) or in a Python process, with weights of 16 bits or of 8 and less.
All of a group are loaded at once, and stopped (SIGSTOP) but for the one whose turn it is. Before that, each is started
by itself with a KV cache of 256 MiB, for the time from exec to the first token and the peak memory at workload A.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
from comparison import Comparison, large_kv
from install import Installer, install, versions
from machine import describe
from processes import end_all_on_signals
from variants import ACTIVATIONS, ENGINES, VARIANTS, Setup, Variant, earlier
from workloads import WORKLOADS

RESULTS = Path(__file__).resolve().parent.parent / "results"
GROUPS = ("http-16bit", "http-8bit", "process-16bit", "process-8bit")


def main() -> int:
    args = _arguments()
    end_all_on_signals()
    cache = args.cache.expanduser().resolve()
    installer = Installer(cache, pip_args=args.pip_args.split(), jobs=args.jobs, nice=args.nice)
    installed, missing = install(installer, args.engines)
    pythons = {"octavo": args.octavo_python, **{k: v for k, v in installed.items() if k != "llama.cpp"}}
    source = args.model or models.find_default(str(args.octavo_python))
    chosen = _chosen(args, {"octavo", *installed})
    gguf = models.gguf_files(source, cache / "models", list(args.formats), str(args.octavo_python))
    wants_folder = "vllm" in installed and "bf16" in args.formats
    folder = models.safetensors_folder(source, cache / "models", str(args.octavo_python)) if wants_folder else None
    setup = Setup(
        kv=large_kv(next(iter(gguf.values()))),
        pythons=pythons,
        llama_server=installed.get("llama.cpp"),
        gguf=gguf,
        folder=folder,
        cores=args.cores,
        logs=cache / "logs",
    )
    if args.setup_only:
        return 1 if missing else 0
    comparison = Comparison(setup, args.workloads, rounds=args.rounds, seed=args.seed, trial=args.trial)
    result: dict[str, Any] = {"benchmark": "cpu_peers", **describe()}
    result |= {"used_cores": list(args.cores), "peers": versions(installed), "left_out": missing, "trial": args.trial}
    for group in args.groups:
        variants = [variant for variant in chosen if variant.group == group]
        if variants:
            print(f"\n## {group}: {', '.join(variant.name for variant in variants)}", flush=True)
            result[group] = comparison.group(variants, alone=not args.skip_alone)
            # After every group, so that a run that is cut off leaves what it has.
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {args.output}")
    return 0


def _chosen(args: argparse.Namespace, there: set[str]) -> list[Variant]:
    wanted = {"", *args.activations}
    chosen = [
        variant
        for variant in VARIANTS
        if variant.engine in args.engines
        and variant.engine in there
        and variant.format in args.formats
        and variant.activations in wanted
    ]
    if args.earlier is not None:
        chosen += [earlier(variant, args.earlier.resolve()) for variant in chosen if variant.engine == "octavo"]
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--formats", nargs="+", choices=models.FORMATS, default=list(models.FORMATS))
    parser.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, default=["int8"], help="of Octavo, in 8 and 4 bits"
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=_cores, default=_cores(""), help="such as 0-3,8; default: all this process has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the one that Octavo serves by default")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/octavo-bench"), help="environments, models, logs")
    parser.add_argument("--octavo-python", type=Path, default=Path(sys.executable), help="an interpreter with Octavo")
    parser.add_argument(
        "--earlier", type=Path, help="another checkout of Octavo, such as a git worktree, to compare with"
    )
    parser.add_argument("--setup-only", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--trial", action="store_true", help="a sixteenth of the output, to see that everything works")
    parser.add_argument("--skip-alone", action="store_true", help="no start times, no memory")
    parser.add_argument("--pip-args", default="", help='for every pip install, such as "--extra-index-url URL"')
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once")
    parser.add_argument("--nice", type=int, default=0, help="niceness of installing and compiling")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_peers.json")
    return parser.parse_args()


def _cores(text: str) -> tuple[int, ...]:
    given = sorted(os.sched_getaffinity(0))
    if not text:
        return tuple(given)
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found.extend(range(int(low), int(high or low) + 1))
    if lacking := sorted(set(found) - set(given)):
        raise argparse.ArgumentTypeError(f"processors {lacking} are not given to this process; it has {given}")
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
