"""`octavo bench`: throughput, latency and steps in this process, or a running server over HTTP."""

from __future__ import annotations

import importlib
import sys
from typing import cast

from octavo.cli.main import Subcommand

BENCHES = {
    "throughput": "all requests at once, in this process: tokens per second, and the machine's own limits",
    "latency": "one batch repeatedly, in this process: seconds per batch",
    "startup": "from exec to ready, in a child process: seconds per phase, with and without kernel caches",
    "steps": "single steps by their size, in this process: a profile for octavo simulate and octavo tune",
    "serve": "requests over HTTP to a running server: throughput, TTFT, TPOT, ITL",
}


def run(argv: list[str]) -> int:
    known = "\n".join(f"  {name:12}{about}" for name, about in BENCHES.items())
    if argv and argv[0] in BENCHES:
        return cast(Subcommand, importlib.import_module(f"octavo.cli.bench.{argv[0]}")).run(argv[1:])
    asked = bool(argv) and argv[0] in ("-h", "--help")
    if argv and not asked:
        print(f"octavo: error: unknown bench {argv[0]!r}", file=sys.stderr)
    print(
        f"usage: octavo bench BENCH [options]\n\n{known}\n\n  octavo bench BENCH --help   its options",
        file=sys.stdout if asked else sys.stderr,
    )
    return 0 if asked else 2
