"""`Counters`: what the scheduler counts, and the gauges it reads off the KV cache."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from octavo.cache.cache import KVCache
from octavo.core.stats import STEP_TOKENS, EngineStats
from octavo.schedule.request import Request


class Counters:
    """The one writer of an `EngineStats`."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.stats = EngineStats(num_blocks=cache.num_blocks, block_size=cache.block_size)

    def snapshot(self, running: int, waiting: int, deferred: int, unfilled: int) -> EngineStats:
        """The counters, with the gauges brought up to date. `unfilled`: what `unfilled` gives for the running ones."""
        stats, cache = self.stats, self._cache
        stats.num_running = running
        stats.num_waiting = waiting
        stats.num_waiting_deferred = deferred
        if waiting <= deferred:
            stats.waits_for = ""
        stats.num_blocks_used = cache.pool.num_used
        stats.num_blocks_cached = cache.pool.num_cached
        stats.blocks_copied = cache.num_copied
        stats.blocks_evicted = cache.num_evicted
        stats.kv_slots_allocated = cache.pool.num_used * cache.block_size
        stats.kv_slots_filled = stats.kv_slots_allocated - unfilled
        return stats

    def forget(self) -> None:
        """Start anew."""
        self._cache.num_copied = self._cache.num_evicted = 0
        self.stats = EngineStats(num_blocks=self._cache.num_blocks, block_size=self._cache.block_size)

    def left(self, waiting: int, seats: int, tokens: int) -> None:
        """So many wait for room now that a step is planned, and so much is left: they lack what has run out."""
        lacking = "seats" if not seats else "step_tokens" if tokens <= 0 else "kv_blocks"
        self.stats.waits_for = lacking if waiting > 0 else ""

    def step(self, rows: int, tokens: int, prompt_tokens: int, sampled: int, unfilled: int) -> None:
        """A step was planned, of whose rows `sampled` get a new token; `unfilled` as for `snapshot`."""
        stats, cache = self.stats, self._cache
        stats.num_steps += 1
        stats.step_tokens += tokens
        stats.step_prompt_tokens += prompt_tokens
        stats.step_sampled += sampled
        stats.steps_by_tokens[bisect_left(STEP_TOKENS, prompt_tokens + sampled)] += 1
        stats.step_rows += rows
        allocated = cache.pool.num_used * cache.block_size
        if allocated:
            stats.waste_samples += 1
            stats.waste_sum += unfilled / allocated

    def admission(self, request: Request, shared: int) -> None:
        """A request got a slot, and `shared` positions of its KV were there already."""
        stats = self.stats
        if request.first_scheduled:
            stats.recomputed_tokens += max(0, request.num_lost - shared)
            return
        request.first_scheduled = time.monotonic()
        request.num_cached = shared
        stats.prefix_cache_queries += request.num_prompt if request.reads_cache else 0
        stats.prefix_cache_hits += shared
        stats.prompt_tokens += request.num_prompt
        stats.prompt_tokens_cached += shared
        stats.prompt_tokens_computed += request.num_prompt - shared

    def times(self, *, plan: float, launch: float, retire: float) -> None:
        """A step's seconds: spent planning, launching, and waiting for tokens and taking them in."""
        stats = self.stats
        stats.plan_s += plan
        stats.launch_s += launch
        stats.retire_s += retire
        stats.last_step_s = plan + launch + retire

    def idle(self, seconds: float) -> None:
        """The device waited for the host."""
        self.stats.idle_s += seconds

    def unfilled(self, running: Sequence[Request]) -> int:
        """Token slots in the requests' blocks that hold no token."""
        return sum(self._cache.unfilled(r.table, r.num_computed) for r in running) if self._cache.num_blocks else 0
