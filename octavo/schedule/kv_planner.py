"""`KvPlanner`: find, reserve and register the KV blocks of requests."""

from __future__ import annotations

from collections.abc import Collection

from octavo.cache.cache import KVCache
from octavo.schedule.request import Request


class KvPlanner:
    """The scheduler's questions to the cache.

    Args:
        share_prefixes: requests use each other's KV.
        watermark: part of the cache that stays free when a request is admitted beside running ones, for their growth.
    """

    def __init__(self, cache: KVCache, *, share_prefixes: bool, watermark: float = 0.0) -> None:
        self._cache = cache
        self._share_prefixes = share_prefixes
        self._reserve = int(watermark * cache.num_blocks)

    def share(self, request: Request, prompts: Collection[Request]) -> bool:
        """Give a waiting request the KV that is there already; False if the choice that computes it is not done.

        `prompts` are the requests whose prompt the step in the making computes or finds; see `StepBuilder`.
        """
        siblings = request.siblings
        if siblings.holds(request):
            return False
        leader = siblings.leader_of(request)
        if leader is not None and leader.finish is None and not request.num_preemptions:
            if leader.slot < 0 or leader.num_computed < leader.num_prompt or leader in prompts:
                return False
            if self._cache.fork(leader.table, request.table, request.num_prompt):
                request.num_computed = request.num_prompt - 1
                return True
        if request.reads_cache:
            request.num_computed = self._cache.match(request.table, self._namespace(request), request.keys)
        return True

    def unshare(self, request: Request) -> None:
        """Take it back."""
        self._cache.release(request.table)
        request.num_computed = 0

    def shortage(self, request: Request, num_running: int) -> int:
        """Blocks missing to admit the request, with some growth of the running ones; <= 0 means it fits."""
        cache = self._cache
        known = len(request.tokens) + min(request.max_tokens, 1)
        missing = cache.missing(request.table, request.num_computed, known)
        growth = min(num_running, cache.num_blocks // 50)
        # Sequences in lockstep wait for each other: one that waited for the others to end would wait for ever.
        reserve = self._reserve if num_running and request.siblings.lockstep is None else 0
        return missing + max(growth, reserve) - cache.num_free

    def register(self, request: Request) -> None:
        """Let others find what is computed of its known tokens."""
        known = min(request.num_computed, len(request.tokens))
        self._cache.register(request.table, self._namespace(request), request.keys, known, request.num_computed)

    def _namespace(self, request: Request) -> str:
        return request.spec.namespace if self._share_prefixes else request.id
