"""How far simulations are from measurements: a server under load is recorded, and the record is simulated.

    python benchmarks/simulation.py [MODEL] [--rates 1 2] [--rounds 3] [--output FILE] [-- flags of octavo serve]

Each round measures the steps (`octavo bench steps`), then starts a server for each rate, sends it requests with
`octavo bench serve`, simulates what the server recorded, and compares both results. With --also, it does the same with
other settings, simulated with the same step times. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")
COMPARED = ("output_throughput", "median_engine_ttft_ms", "p99_engine_ttft_ms")
COMPARED += tuple(f"{kind}_{metric}_ms" for metric in METRICS for kind in ("median", "p99"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 3.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--also", default="", metavar="FLAGS", help="settings to measure and simulate besides")
    parser.add_argument("--output", type=Path)
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    args, flags = parser.parse_args(own[:cut]), own[cut + 1 :]
    rounds = [one_round(args, flags) for _ in range(args.rounds)]
    result = {
        "command": " ".join(["python benchmarks/simulation.py", *own]),
        "machine": machine(),
        "version": octavo("--version").strip(),
        "load": f"random prompts of {args.input_len} tokens, answers of {args.output_len}, both +/- 80 %",
        "step_errors": [one["step_errors"] for one in rounds],
        "loads": [summary(load, [one["loads"][load] for one in rounds]) for load in rounds[0]["loads"]],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


def one_round(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "profile.json"
        octavo("bench", "steps", args.model, *flags, "--output", str(profile), "--seconds", f"{args.seconds:g}")
        loads = [(rate, changes) for rate in args.rates for changes in dict.fromkeys(("", args.also))]
        found = {load: one_load(args, flags, *load, folder, profile) for load in loads}
        return {"step_errors": json.loads(profile.read_text())["errors"], "loads": found}


def one_load(
    args: argparse.Namespace, flags: list[str], rate: float, changes: str, folder: Path, profile: Path
) -> dict[str, dict[str, float]]:
    trace = folder / "trace.jsonl"
    shown = ["--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "99"]
    with serving(args.model, [*flags, *changes.split(), "--record-traffic", str(trace)]) as port:
        load = ["bench", "serve", "--port", str(port), "--ready-check-timeout-sec", "300", *shown]
        load += ["--dataset-name", "random", "--ignore-eos"]
        load += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
        load += ["--random-range-ratio", "0.8", "--result-dir", str(folder), "--result-filename", "measured.json"]
        octavo(*load, "--num-prompts", "8", "--seed", "7")  # warms the server and the client
        warm = len(trace.read_text().splitlines())
        load += ["--num-prompts", str(args.requests), "--request-rate", f"{rate:g}", "--save-result"]
        octavo(*load)
    lines = trace.read_text().splitlines()[warm:]
    trace.write_text("\n".join(lines) + "\n")
    output = folder / "simulated.json"
    octavo(
        "simulate",
        "--profile",
        str(profile),
        "--trace",
        str(trace),
        *changes.split(),
        *shown,
        "--output-json",
        str(output),
    )
    both = {"measured": json.loads((folder / "measured.json").read_text()), "simulated": json.loads(output.read_text())}
    for kind, percent in (("median", 50), ("p99", 99)):  # without HTTP, as the simulation has it
        engine = sorted(json.loads(line)["ttft"] for line in lines)
        both["measured"][f"{kind}_engine_ttft_ms"] = engine[(len(engine) - 1) * percent // 100]
        both["simulated"][f"{kind}_engine_ttft_ms"] = both["simulated"][f"{kind}_ttft_ms"]
    return both


def summary(load: tuple[float, str], rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    def median_of(kind: str, name: str) -> float:
        return statistics.median(one[kind][name] for one in rounds)

    figures = {}
    for name in COMPARED:
        measured, simulated = median_of("measured", name), median_of("simulated", name)
        errors = [one["simulated"][name] / one["measured"][name] - 1 for one in rounds]
        figures[name] = {
            "measured": round(measured, 2),
            "simulated": round(simulated, 2),
            "error": round(statistics.median(errors), 3),
            "errors": [round(error, 3) for error in errors],
        }
    busy = median_of("simulated", "device_busy")
    return {"rate": load[0], "changed": load[1], "busy": round(busy, 3), "figures": figures}


@contextlib.contextmanager
def serving(model: str, flags: list[str]) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield port
        finally:
            server.terminate()


def octavo(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "octavo", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"octavo {' '.join(words)}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def machine() -> str:
    name = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available() and "cpu" not in sys.argv:
            return f"{torch.cuda.get_device_name(0)}; {os.cpu_count()} cores of {name}"
    return f"{os.cpu_count()} cores of {name}"


if __name__ == "__main__":
    main()
