"""`Counters`: what the scheduler counts, and the gauges it reads off the KV cache."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from octavo.cache.cache import KVCache
from octavo.core.stats import STEP_TOKENS, EngineStats
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request
from octavo.schedule.watcher import Watchers


class Counters:
    """The one writer of an `EngineStats`.

    Attributes:
        watchers: of the features `hooks`.
    """

    def __init__(self, cache: KVCache, hooks: Sequence[EngineHook] = ()) -> None:
        self._cache = cache
        self.watchers = Watchers(hooks, cache)
        self.stats = EngineStats(num_blocks=cache.num_blocks, block_size=cache.block_size)

    def snapshot(self, running: int, waiting: int, deferred: int, unfilled: int) -> EngineStats:
        """Return the counters with current gauges. `unfilled`: the result of `unfilled` for the running requests."""
        stats, cache = self.stats, self._cache
        stats.num_running = running
        stats.num_waiting = waiting
        stats.num_waiting_deferred = deferred
        if waiting <= deferred:
            stats.waits_for = ""
        stats.num_blocks_used = cache.pool.num_used
        stats.num_blocks_cached = cache.pool.num_cached
        stats.num_blocks_leased = cache.num_leased
        stats.blocks_copied = cache.num_copied
        stats.blocks_evicted = cache.num_evicted
        stats.kv_slots_allocated = (cache.pool.num_used - stats.num_blocks_leased) * cache.block_size
        stats.kv_slots_filled = stats.kv_slots_allocated - unfilled
        return stats

    def forget(self) -> None:
        """Reset all counters."""
        self._cache.num_copied = self._cache.num_evicted = 0
        self.stats = EngineStats(num_blocks=self._cache.num_blocks, block_size=self._cache.block_size)
        self.watchers.tell("forget")

    def left(self, waiting: int, seats: int, tokens: int) -> None:
        """Record what limits admission after a step was planned.

        Args:
            waiting: requests that still wait for resources.
            seats: free slots.
            tokens: token budget that the step left unused.
        """
        lacking = "seats" if not seats else "step_tokens" if tokens <= 0 else "kv_blocks"
        self.stats.waits_for = lacking if waiting > 0 else ""

    def step(self, rows: int, tokens: int, prompt_tokens: int, sampled: int, unfilled: int) -> None:
        """Count a planned step; `sampled` of its rows get a new token. `unfilled` as for `snapshot`."""
        stats, cache = self.stats, self._cache
        stats.num_steps += 1
        stats.step_tokens += tokens
        stats.step_prompt_tokens += prompt_tokens
        stats.step_sampled += sampled
        stats.steps_by_tokens[bisect_left(STEP_TOKENS, prompt_tokens + sampled)] += 1
        stats.step_rows += rows
        used = cache.pool.num_used - cache.num_leased if cache.leases else cache.pool.num_used
        allocated = used * cache.block_size
        if allocated:
            stats.waste_samples += 1
            stats.waste_sum += unfilled / allocated

    def admission(self, request: Request, shared: int) -> None:
        """Count an admitted request; `shared` positions of its KV were already cached."""
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
        """Add a step's times in seconds: planning, launching, and retiring (wait for its tokens and commit them)."""
        stats = self.stats
        stats.plan_s += plan
        stats.launch_s += launch
        stats.retire_s += retire
        stats.last_step_s = plan + launch + retire

    def idle(self, seconds: float) -> None:
        """Add seconds for which the device waited for the host."""
        self.stats.idle_s += seconds

    def unfilled(self, running: Sequence[Request]) -> int:
        """Return the token slots in the requests' blocks that hold no token."""
        return sum(self._cache.unfilled(r.table, r.num_computed) for r in running) if self._cache.num_blocks else 0
