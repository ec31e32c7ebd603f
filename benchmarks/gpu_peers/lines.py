"""The offline lines: requests that are handed over at once, and the figure that is read off the seconds they took.

Six are Octavo's workloads (`octavo/bench/workloads.py`); `documents` and `short` are this comparison's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workloads import Request

from octavo.bench.workloads import RESERVED, workload


@dataclass(frozen=True, slots=True)
class Line:
    """
    Attributes:
        words: what the requests are, for the table.
        unit: "output tok/s", "input tok/s" or "s".
        make: (seed, vocabulary size, scale) -> requests; equal seeds give all engines the same ones.
    """

    name: str
    words: str
    unit: str
    make: Callable[[int, int, float], list[Request]]

    @property
    def more_is_better(self) -> bool:
        return self.unit != "s"

    def figure(self, requests: Sequence[Request], seconds: float) -> float:
        if self.unit == "s":
            return seconds
        counts_output = self.unit == "output tok/s"
        return sum(each.output_tokens if counts_output else len(each.prompt) for each in requests) / seconds


def _shipped(name: str) -> Callable[[int, int, float], list[Request]]:
    def make(seed: int, vocab_size: int, scale: float) -> list[Request]:
        works = workload(name, seed=seed, vocab_size=vocab_size, scale=scale)
        return [Request(each.prompt, each.output_tokens) for each in works]

    return make


def _even(name: str, count: int, prompt: int, answer: int) -> Callable[[int, int, float], list[Request]]:
    def make(seed: int, vocab_size: int, scale: float) -> list[Request]:
        draw = random.Random(f"{name}-{seed}")
        vocab = range(RESERVED, vocab_size - RESERVED)
        return [Request(draw.choices(vocab, k=prompt), answer) for _ in range(max(1, round(count * scale)))]

    return make


LINES = {
    line.name: line
    for line in (
        Line("chat", "1,000 requests, about 214 in, 215 out", "output tok/s", _shipped("chat")),
        Line("decode", "256 requests, 128 in, 512 out", "output tok/s", _shipped("decode")),
        Line("single", "1 request, 128 in, 256 out", "output tok/s", _shipped("single")),
        Line("prefill", "64 requests, 2,048 in, 1 out", "input tok/s", _shipped("prefill")),
        Line("long", "32 requests, 8,192 in, 256 out", "s", _shipped("long")),
        Line("shared", "256 requests, 1,024 shared and 64 own in, 64 out", "s", _shipped("shared")),
        Line("documents", "4 requests, 14,000 in, 512 out", "s", _even("documents", 4, 14_000, 512)),
        Line("short", "2,000 requests, 32 in, 32 out", "s", _even("short", 2000, 32, 32)),
    )
}
WARM_SCALE = 0.1
"""Share of a line's requests that run before it is timed."""
