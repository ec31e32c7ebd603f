"""The five workloads: which requests each is made of, and what is read off the time they took."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids in, and how many tokens are to come out: greedy, the end of sequence ignored."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went for requests that were all sent at once. Times in seconds.

    `last` is when everything was there; `first`, the time to the first token, is given where there is one request.
    """

    last: float
    tokens: list[int]
    first: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    words: str
    unit: str
    make: Callable[[random.Random, range], list[Request]]
    figure: Callable[[Sequence[Request], Outcome], float]

    @property
    def more_is_better(self) -> bool:
        return self.unit != "s"

    def requests(self, seed: str, vocab_size: int) -> list[Request]:
        """The requests of one turn. Equal seeds give equal requests, so that all engines get the same ones.

        C's lengths depend on the workload alone: every round has the same amount of work.
        """
        return self.make(random.Random(f"{self.name}-{seed}"), range(1000, vocab_size - 1000))


def _prompt(rng: random.Random, vocab: range, length: int) -> list[int]:
    return rng.choices(vocab, k=length)


def _single(rng: random.Random, vocab: range) -> list[Request]:
    return [Request(_prompt(rng, vocab, 32), 256)]


def _batch(rng: random.Random, vocab: range) -> list[Request]:
    return [Request(_prompt(rng, vocab, 128), 128) for _ in range(16)]


def _mixed(rng: random.Random, vocab: range) -> list[Request]:
    lengths = random.Random(0)
    return [Request(_prompt(rng, vocab, lengths.randint(32, 512)), lengths.randint(16, 256)) for _ in range(64)]


def _long(rng: random.Random, vocab: range) -> list[Request]:
    return [Request(_prompt(rng, vocab, 2048), 1)]


def _shared(rng: random.Random, vocab: range) -> list[Request]:
    head = _prompt(rng, vocab, 1024)
    return [Request(head + _prompt(rng, vocab, 32), 16) for _ in range(32)]


def _decode_rate(requests: Sequence[Request], outcome: Outcome) -> float:
    assert outcome.first is not None
    return (requests[0].output_tokens - 1) / (outcome.last - outcome.first)


def _output_rate(requests: Sequence[Request], outcome: Outcome) -> float:
    return sum(request.output_tokens for request in requests) / outcome.last


def _input_rate(requests: Sequence[Request], outcome: Outcome) -> float:
    return sum(len(request.prompt) for request in requests) / outcome.last


def _seconds(_: Sequence[Request], outcome: Outcome) -> float:
    return outcome.last


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("A", "1 request, 32 in, 256 out: after its first token", "output tok/s", _single, _decode_rate),
        Workload("B", "16 requests, 128 in, 128 out", "output tok/s", _batch, _output_rate),
        Workload("C", "64 requests, 32 to 512 in, 16 to 256 out", "output tok/s", _mixed, _output_rate),
        Workload("D", "1 request, 2,048 in, 1 out", "input tok/s", _long, _input_rate),
        Workload("E", "32 requests, 1,024 shared and 32 own in, 16 out", "s", _shared, _seconds),
    )
}
WAKE = [Request(list(range(1000, 1016)), 4)]
"""A few tokens, not measured, for an engine whose turn it is: its threads wake up and its memory is in reach again."""
WARM = [Request(list(range(1000 + n, 1000 + n + 64 * n)), 8) for n in range(1, 9)]
"""Not measured: whatever an engine does only once, it does now."""


def check(requests: Sequence[Request], outcome: Outcome) -> None:
    """Raises RuntimeError if an engine did less than it was asked for."""
    wanted = [request.output_tokens for request in requests]
    if outcome.tokens != wanted:
        raise RuntimeError(f"asked for {wanted} tokens, got {outcome.tokens}")
