"""The offline workloads, the same on every machine and for every engine: token-id prompts and output lengths.

A workload's name determines its lengths; the seed determines its tokens, so that two runs with different seeds share no
prefix. Run them greedily with end-of-sequence ignored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

RESERVED = 1000
"""Ids at either end of the vocabulary that no prompt uses: special tokens are usually there."""


class Work(NamedTuple):
    """One request: its prompt and its number of output tokens."""

    prompt: list[int]
    output_tokens: int


class _Draw:
    """Two independent random generators: `shape` for lengths, `ids` for tokens."""

    def __init__(self, name: str, seed: int, vocab_size: int) -> None:
        self.shape = random.Random(sum(ord(letter) * 131**place for place, letter in enumerate(name)))
        self.tokens = random.Random(f"{name}-{seed}")
        self.vocab_size = vocab_size

    def ids(self, count: int) -> list[int]:
        return [self.tokens.randrange(RESERVED, self.vocab_size - RESERVED) for _ in range(count)]

    def lengths(self, count: int, *, mean: float, sigma: float, low: int, high: int) -> list[int]:
        """Return log-normal lengths of the given mean, clipped to `low` and `high`."""
        mu = math.log(mean) - sigma**2 / 2
        return [min(high, max(low, round(self.shape.lognormvariate(mu, sigma)))) for _ in range(count)]


def _chat(draw: _Draw, requests: int) -> list[Work]:
    prompts = draw.lengths(requests, mean=230, sigma=1.0, low=4, high=1024)
    answers = draw.lengths(requests, mean=210, sigma=0.9, low=4, high=1024)
    return [Work(draw.ids(length), answer) for length, answer in zip(prompts, answers, strict=True)]


def _shared(draw: _Draw, requests: int) -> list[Work]:
    head = draw.ids(1024)
    return [Work(head + draw.ids(64), 64) for _ in range(requests)]


def _even(prompt: int, answer: int) -> Callable[[_Draw, int], list[Work]]:
    return lambda draw, requests: [Work(draw.ids(prompt), answer) for _ in range(requests)]


# name -> (requests at scale 1, generator, description)
WORKLOADS: dict[str, tuple[int, Callable[[_Draw, int], list[Work]], str]] = {
    "chat": (1000, _chat, "conversations: about 220 tokens in and 200 out, log-normal"),
    "decode": (256, _even(128, 512), "many streams, bound by decoding"),
    "single": (1, _even(128, 256), "one stream, for latency"),
    "prefill": (64, _even(2048, 1), "prompt processing alone"),
    "long": (32, _even(8192, 256), "long contexts, bound by reading the KV cache"),
    "shared": (256, _shared, "a system prompt of 1,024 tokens that all share"),
}


def workload(name: str, *, seed: int = 0, vocab_size: int = 128_000, scale: float = 1.0) -> list[Work]:
    """Return the requests of a workload. `scale` multiplies their number, not their lengths.

    Raises:
        KeyError: no workload has that name.
        ValueError: the vocabulary is too small to draw from.
    """
    if vocab_size <= 2 * RESERVED:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is too small: workloads need more than {2 * RESERVED}")
    requests, make, _ = WORKLOADS[name]
    count = 1 if requests == 1 else max(1, round(requests * scale))
    return make(_Draw(name, seed, vocab_size), count)
