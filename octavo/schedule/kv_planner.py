"""`KvPlanner`: find, reserve and register the KV blocks of requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from octavo.cache.cache import KVCache
from octavo.schedule.hooks import EngineHook, marked, revised
from octavo.schedule.request import Request
from octavo.schedule.tiers import Tiers
from octavo.schedule.watcher import Watchers


class KvPlanner:
    """Finds, reserves and registers KV blocks for the scheduler.

    Args:
        share_prefixes: let requests reuse each other's KV.
        watermark: fraction of the cache (0 to 1) kept free for the growth of running requests when one is admitted.
        watchers: learn of loads.
        tiers: transfers from and to tiers; None for none. They need shared prefixes.
        hooks: features that may hold blocks, or that KV depends on.
        life: of the engine; see `hooks.namespaced`.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        share_prefixes: bool,
        watchers: Watchers,
        watermark: float = 0.0,
        tiers: Tiers | None = None,
        hooks: Sequence[EngineHook] = (),
        life: str = "",
    ) -> None:
        self._cache = cache
        self._tiers = tiers
        self._watchers = watchers
        self._lenders = [hook for hook in hooks if type(hook).reclaim is not EngineHook.reclaim]
        self._revising = [hook for hook in hooks if type(hook).revision is not EngineHook.revision]
        self._marking = [hook for hook in hooks if type(hook).mark is not EngineHook.mark] if share_prefixes else []
        self._awaited = [hook for hook in hooks if type(hook).waits is not EngineHook.waits]
        self._life = life
        self._share_prefixes = share_prefixes
        self._reserve = int(watermark * cache.num_usable)

    def share(self, request: Request, prompts: Collection[Request]) -> bool:
        """Give a waiting request the KV that is already computed.

        Args:
            prompts: requests whose prompt the step being built computes or finds; see `StepBuilder`.

        Returns:
            False if the request must wait: for the sibling that computes their common prompt, a load, or a feature.
        """
        siblings = request.siblings
        if siblings.holds(request) or (self._tiers is not None and self._tiers.waits(request)):
            return False
        if any(hook.waits(request) for hook in self._awaited):
            return False
        request.namespace = revised(request, self._revising) if self._share_prefixes else request.id
        request.marks = marked(request, self._marking, self._life) if self._marking else ()
        leader = siblings.leader_of(request)
        if leader is not None and leader.finish is None and not request.num_preemptions:
            if leader.slot < 0 or leader.num_computed < leader.num_prompt or leader in prompts:
                return False
            if self._cache.fork(leader.table, request.table, request.num_prompt):
                request.num_computed = request.num_prompt - 1
                return True
        keys = request.keys if request.reads_cache else ()
        self._cache.seat(request.table, request.namespace, keys, len(request.tokens) + 1)
        if request.reads_cache:
            request.num_computed = self._cache.match(request.table, request.namespace, keys)
        return True

    def unshare(self, request: Request) -> None:
        """Undo `share`."""
        self._cache.release(request.table)
        request.num_computed = 0

    def load(self, request: Request) -> bool:
        """Begin to load what tiers have of a request's prefix beyond what it shares; False if that is nothing.

        If it is something, the request must wait: take back what it shares.
        """
        if self._tiers is None or not request.reads_cache or not self._tiers.load(request):
            return False
        self._watchers.tell("loading", request, *self._tiers.awaited(request))
        return True

    def names(self, request: Request) -> Sequence[bytes]:
        """Return the names that tiers have for the full blocks of its tokens; see `Pages.names`."""
        own = bool(request.marks) or (self._life != "" and self._life in request.namespace)
        return () if self._tiers is None or own else self._tiers.names(request)

    def admitted(self, request: Request) -> None:
        """The request was given a slot."""
        if self._tiers is not None:
            self._tiers.admitted(request)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self._tiers is not None:
            self._tiers.forget(request)

    def reset(self) -> None:
        """Drop cached contents, and what is on its way to tiers. Running requests keep their blocks."""
        self._cache.reset()
        if self._tiers is not None:
            self._tiers.reset()

    def rebuild(self) -> None:
        """Derive what transfers hold from the transfers themselves, after a failure."""
        if self._tiers is not None:
            self._tiers.rebuild()

    def let_go(self) -> bool:
        """Hold blocks that were loaded for a waiting request no longer; False if there are none."""
        return self._tiers is not None and self._tiers.let_go()

    def reclaim(self, count: int, request: Request) -> bool:
        """Have features give back about `count` blocks for a request that lacks them; return whether any came free."""
        before = self._cache.num_free
        for hook in self._lenders:
            lacking = before + count - self._cache.num_free
            if lacking > 0:
                hook.reclaim(lacking, request)
        return self._cache.num_free > before

    def shortage(self, request: Request, num_running: int) -> int:
        """Return the blocks missing to admit the request, with some growth of the running ones; <= 0 means it fits."""
        cache = self._cache
        known = len(request.tokens) + min(request.max_tokens, 1)
        missing = cache.missing(request.table, request.num_computed, known)
        growth = min(-(-num_running // cache.ranks) * len(cache.groups), cache.num_usable // 50)
        # Sequences in lockstep wait for each other; with a reserve, one would wait forever for the others to end.
        reserve = self._reserve if num_running and request.siblings.lockstep is None else 0
        return missing + max(growth, reserve) - cache.free_for(request.table)

    def register(self, request: Request) -> None:
        """Register the computed blocks of its known tokens, so that other requests find them."""
        known = min(request.num_computed, len(request.tokens))
        if known // self._cache.block_size <= request.table.num_registered:
            return  # most tokens fill no block
        registered: list[tuple[int, list[int]]] | None = None if self._tiers is None else []
        self._cache.register(request.table, request.namespace, request.keys, known, request.num_computed, registered)
        if registered and self._tiers is not None:
            self._tiers.store(request, registered)
