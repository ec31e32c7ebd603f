"""`octavo bench startup`: seconds from exec until an engine is ready, and its phases, in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.bench.report import check_place, save
from octavo.cli.bench.offline import open_llm
from octavo.cli.flags import units
from octavo.cli.flags.args import add_engine_settings
from octavo.cli.flags.parser import OctavoParser
from octavo.core.terminal import say

_CHILD = "OCTAVO_BENCH_STARTUP_CHILD"
_READY = "ready: "
"""Prefix of the line that the child prints as soon as its engine is ready."""
_CACHES = ("TRITON_CACHE_DIR", "OCTAVO_KERNEL_CACHE")


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_place(args.output_json, "--output-json")
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
        description="Time the start, from exec to ready, with empty kernel caches, then with full ones.",
    )
    group = parser.add_argument_group("startup")
    group.add_argument("--num-iters", type=units.count, default=3, metavar="N", help="warm starts (default: 3)")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there")
    add_engine_settings(parser)
    return parser


def _in_child(argv: list[str], caches: dict[str, str]) -> dict[str, Any]:
    """Start once in a child process and return the figures.

    `ready_seconds` is measured here, from just before exec until the child is ready: it includes the interpreter and
    its imports, which the child can't time itself.
    """
    command = [sys.executable, "-m", "octavo", "bench", "startup", *argv]
    began = time.perf_counter()
    figures: dict[str, Any] = {}
    with subprocess.Popen(
        command, env={**os.environ, **caches, _CHILD: "1"}, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(_READY):
                seconds = time.perf_counter() - began
                figures = {"ready_seconds": round(seconds, 3), **json.loads(line.removeprefix(_READY))}
    if child.returncode:
        raise SystemExit(child.returncode)
    return figures


def _start(parser: OctavoParser, args: Any) -> int:
    with open_llm(parser, args) as llm:
        engine_seconds = round(sum(llm.info.phases.values()), 3)
        print(_READY + json.dumps({"engine_seconds": engine_seconds, "phases": llm.info.phases}), flush=True)
    return 0


def _text(figures: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in figures["phases"].items())
    rest = figures["ready_seconds"] - figures["engine_seconds"]
    return f"{figures['ready_seconds']:.2f} s (Python and imports {rest:.2f}, {phases})"
