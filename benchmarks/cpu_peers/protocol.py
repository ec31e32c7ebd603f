"""How the benchmark talks to an engine that lives in another process: a line of JSON there, a line of JSON back.

The engine's own chatter on standard output goes to standard error; the answers have a channel of their own. The file
imports nothing but the standard library, for it runs in every engine's environment.

    {"do": "run", "requests": [[[ids], output_tokens], ...]}  ->  {"last": s, "first": s or null, "tokens": [n, ...]}
    {"do": "close"}  ->  the process ends

At the start a worker says {"ready": true, "version": {...}}; whatever goes wrong is {"error": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

Pair = tuple[list[int], int]


class Engine(Protocol):
    """What a worker gives to `serve`."""

    def versions(self) -> Mapping[str, str]: ...

    def one(self, prompt: list[int], count: int, mark: Callable[[], None]) -> int:
        """Run one request, calling `mark` when its first token is there; how many tokens came out."""
        ...

    def many(self, pairs: list[Pair]) -> list[int]:
        """Run all at once; how many tokens came out of each, in order."""
        ...


def serve(make: Callable[[dict[str, Any]], Engine]) -> None:
    """The life of a worker: its settings are the first argument, as JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        engine = make(json.loads(sys.argv[1]))
        _say(answers, {"ready": True, "version": dict(engine.versions())})
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "close":
                break
            _say(answers, _run(engine, [(prompt, count) for prompt, count in order["requests"]]))
    except Exception as error:
        traceback.print_exc()
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
    # Some engines hang in their destructors, and the work is done.
    sys.stderr.flush()
    os._exit(0)


def _run(engine: Engine, pairs: list[Pair]) -> dict[str, Any]:
    marks: list[float] = []
    started = time.perf_counter()
    if len(pairs) == 1:
        tokens = [engine.one(*pairs[0], lambda: marks.append(time.perf_counter() - started))]
    else:
        tokens = engine.many(pairs)
    last = time.perf_counter() - started
    return {"last": last, "first": marks[0] if marks else None, "tokens": tokens}


def _say(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
