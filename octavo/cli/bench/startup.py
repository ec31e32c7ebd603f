"""`octavo bench startup`: seconds from settings to an engine that is ready, by phase, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.bench.report import save
from octavo.cli.bench.offline import open_llm
from octavo.cli.flags import units
from octavo.cli.flags.args import add_engine_settings
from octavo.cli.flags.parser import OctavoParser, say

_CHILD = "OCTAVO_BENCH_STARTUP_CHILD"
_CACHES = ("TRITON_CACHE_DIR", "OCTAVO_KERNEL_CACHE")


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if os.environ.get(_CHILD):
        return _start(parser, args)
    with tempfile.TemporaryDirectory() as empty:
        cold = _in_child(argv, {name: f"{empty}/{name}" for name in _CACHES})
        say("with empty kernel caches: " + _text(cold))
        warm = [_in_child(argv, {name: f"{empty}/{name}" for name in _CACHES}) for _ in range(args.num_iters)]
    for each in warm:
        say("with kernels at hand: " + _text(each))
    best = min(warm, key=lambda each: float(each["ready_seconds"]))
    cold_s, warm_s = cold["ready_seconds"], best["ready_seconds"]
    print(f"Ready after {cold_s:.2f} s with empty kernel caches, {warm_s:.2f} s with full ones")
    if args.output_json:
        save({"cold": cold, "warm": warm}, args.output_json)
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo bench startup",
        words="[MODEL]",
        description="Time the start with empty kernel caches, then with full ones, each in a process of its own.",
    )
    group = parser.add_argument_group("startup")
    group.add_argument("--num-iters", type=units.count, default=3, metavar="N", help="warm starts (default: 3)")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there")
    add_engine_settings(parser)
    return parser


def _in_child(argv: list[str], caches: dict[str, str]) -> dict[str, Any]:
    """One start's figures; the child's last line is JSON."""
    command = [sys.executable, "-m", "octavo", "bench", "startup", *argv]
    done = subprocess.run(
        command, env={**os.environ, **caches, _CHILD: "1"}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _start(parser: OctavoParser, args: Any) -> int:
    began = time.perf_counter()
    with open_llm(parser, args) as llm:
        print(json.dumps({"ready_seconds": round(time.perf_counter() - began, 3), "phases": llm.info.phases}))
    return 0


def _text(figures: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in figures["phases"].items())
    return f"{figures['ready_seconds']:.2f} s ({phases})"
