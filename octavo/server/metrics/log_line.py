"""The periodic log line with throughput and load, in the wording that log parsers expect."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from octavo.core.stats import EngineStats

logger = logging.getLogger("octavo.server")


_REMEDIES = {
    "seats": "a seat (--max-num-seqs)",
    "step_tokens": "tokens of a step (--max-num-batched-tokens)",
    "kv_blocks": "KV cache (--kv-cache-memory-bytes)",
}
"""The resource that the queue waits for, by `EngineStats.waits_for`, and the setting that limits it."""


class StatsLine:
    """Compares each snapshot with the previous one. While idle, it returns a line once and then none."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._remember(stats, now)
        self._hit_rate = 0.0
        self._was_busy = False

    def next(self, stats: EngineStats, now: float) -> str | None:
        """Return the line for the time since the last call, or None if there is nothing to report."""
        elapsed = max(now - self._at, 1e-9)
        prompt = stats.step_prompt_tokens - self._prompt
        generated = stats.generation_tokens - self._generated
        queries = stats.prefix_cache_queries - self._queries
        if queries > 0:
            self._hit_rate = (stats.prefix_cache_hits - self._hits) / queries
        preempted = stats.num_preemptions - self._preemptions
        self._remember(stats, now)
        busy = bool(prompt or generated or stats.num_running or stats.num_waiting)
        tells, self._was_busy = busy or self._was_busy, busy
        if not tells:
            return None
        line = (
            f"Engine 000: Avg prompt throughput: {prompt / elapsed:.1f} tokens/s, "
            f"Avg generation throughput: {generated / elapsed:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"GPU KV cache usage: {stats.kv_usage * 100:.1f}%, Prefix cache hit rate: {self._hit_rate * 100:.1f}%"
        )
        if preempted:
            line += f", Preempted: {preempted} reqs"
        if stats.waits_for:
            line += f", Waiting for: {_REMEDIES[stats.waits_for]}"
        elif stats.waits:
            line += f", Waiting for: {next(iter(stats.waits.values()))}"
        return line

    def _remember(self, stats: EngineStats, now: float) -> None:
        # Copy the numbers: an engine may update one snapshot in place.
        self._at = now
        self._prompt = stats.step_prompt_tokens
        self._generated = stats.generation_tokens
        self._preemptions = stats.num_preemptions
        self._queries = stats.prefix_cache_queries
        self._hits = stats.prefix_cache_hits


async def log_stats(read: Callable[[], EngineStats], interval_s: float) -> None:
    """Log the line every `interval_s` seconds until cancelled; an interval of 0 logs nothing."""
    if interval_s <= 0:
        return
    line = StatsLine(read(), time.monotonic())
    while True:
        await asyncio.sleep(interval_s)
        text = line.next(read(), time.monotonic())
        if text is not None:
            logger.info("%s", text)
