"""Streamed requests that arrive at a rate, over HTTP, by a client that belongs to neither engine.

Every request has a connection of its own. Arrivals are a Poisson process that depends on the seed alone, so that all
engines see the same one. A request is sent when it is due, whatever became of those before it (an open loop).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import http_client
from workloads import Request

_TOKEN_EVENT = b'"text":'
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Traffic:
    """
    Attributes:
        rate: requests a second on average.
        seconds: how long requests keep arriving.
        prompt, answer: tokens of each request; ends of sequence are ignored.
    """

    rate: float
    seconds: float
    prompt: int = 256
    answer: int = 128

    def arrivals(self, seed: int, vocab_size: int) -> list[tuple[float, Request]]:
        """(Seconds from the start, request), in order."""
        draw, vocab, due = random.Random(f"{self.rate}-{seed}"), range(1000, vocab_size - 1000), 0.0
        found = []
        while (due := due + draw.expovariate(self.rate)) < self.seconds:
            found.append((due, Request(draw.choices(vocab, k=self.prompt), self.answer)))
        return found


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from when the request was due to each event that carried text, and the tokens that the server counted."""

    events: list[float]
    tokens: int


def run(address: http_client.Address, arrivals: Sequence[tuple[float, Request]]) -> list[Timing]:
    """Send every request when it is due; timings in the order of arrival.

    Raises:
        RuntimeError: a request was refused, or its answer had another number of tokens than asked for.
    """
    return asyncio.run(_run(address, arrivals))


async def _run(address: http_client.Address, arrivals: Sequence[tuple[float, Request]]) -> list[Timing]:
    messages = [http_client.message(address, request) for _, request in arrivals]
    began = time.perf_counter() + 0.1
    async with asyncio.timeout(_TIMEOUT_S):
        timings = await asyncio.gather(
            *(_send(address, message, began + due) for message, (due, _) in zip(messages, arrivals, strict=True))
        )
    for timing, (_, request) in zip(timings, arrivals, strict=True):
        if timing.tokens != request.output_tokens or not timing.events:
            raise RuntimeError(f"asked for {request.output_tokens} tokens, got {timing.tokens}")
    return timings


async def _send(address: http_client.Address, message: bytes, due: float) -> Timing:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    reader, writer = await asyncio.open_connection(address.host, address.port)
    events: list[float] = []
    parts: list[bytes] = []
    tail = b""
    try:
        writer.write(message)
        await writer.drain()
        while part := await reader.read(1 << 16):
            now = time.perf_counter() - due
            parts.append(part)
            # An event may be cut anywhere, its mark too.
            seen = tail + part
            events.extend([now] * seen.count(_TOKEN_EVENT))
            tail = seen[-(len(_TOKEN_EVENT) - 1) :]
    finally:
        writer.close()
    return Timing(events, http_client.completion_tokens(b"".join(parts)))


def figures(timings: Sequence[Timing]) -> Mapping[str, float]:
    """Milliseconds: time to first token, gaps between events, and time per output token after the first."""
    first = [timing.events[0] for timing in timings]
    gaps = [b - a for timing in timings for a, b in zip(timing.events, timing.events[1:], strict=False)]
    each = [(t.events[-1] - t.events[0]) / (t.tokens - 1) for t in timings if t.tokens > 1]
    found: dict[str, float] = {"requests": len(timings)}
    for name, seconds in (("ttft", first), ("itl", gaps), ("tpot", each)):
        found[f"{name}_p50_ms"] = round(_percentile(seconds, 50) * 1e3, 3)
        found[f"{name}_p99_ms"] = round(_percentile(seconds, 99) * 1e3, 3)
    return found


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
