"""`Requests`: the waiting and the running requests, and the slots and KV blocks that the running ones hold."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence

from octavo.cache.cache import KVCache
from octavo.cache.table import BlockTable
from octavo.core.output import FinishReason
from octavo.schedule.hooks import EngineHook, finished, finishing, released
from octavo.schedule.kv_planner import KvPlanner
from octavo.schedule.limits import Limits
from octavo.schedule.policy import Policy
from octavo.schedule.request import Request
from octavo.schedule.tiers import Tiers
from octavo.schedule.watcher import PreemptionCause, Watchers


class Requests:
    """All requests that have not been released.

    Attributes:
        waiting: requests without a slot, in the policy's order.
        running: requests with a slot, by rank.
        kv: finds, reserves and registers their KV blocks.
    """

    def __init__(
        self,
        cache: KVCache,
        policy: Policy,
        limits: Limits,
        hooks: Sequence[EngineHook],
        watchers: Watchers,
        tiers: Tiers | None = None,
        life: str = "",
    ) -> None:
        self.waiting = policy.queue()
        self.running: list[Request] = []
        self.kv = KvPlanner(
            cache,
            share_prefixes=limits.share_prefixes,
            watermark=limits.watermark,
            tiers=tiers,
            watchers=watchers,
            hooks=hooks,
            life=life,
        )
        self._cache = cache
        self._policy = policy
        self._hooks = hooks
        self._watchers = watchers
        self._finishing = finishing(hooks)
        self._alive: dict[str, list[Request]] = {}
        self._num_slots = limits.max_num_seqs
        self._free_slots = list(range(self._num_slots - 1, -1, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._alive

    def __len__(self) -> int:
        """Return the number of live requests; the choices of a request count once."""
        return len(self._alive)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def choices(self, request_id: str | None, index: int | None) -> Iterator[Request]:
        """Return the choices of a request (None: of all), or the one with this index; empty for an unknown id."""
        found = list(self._alive.values()) if request_id is None else [self._alive.get(request_id, [])]
        return (choice for one in found for choice in one if index is None or choice.index == index)

    def shortage(self, request: Request) -> int:
        """Return the blocks missing to admit a waiting request; <= 0 means it fits."""
        return self.kv.shortage(request, len(self.running))

    def add(self, choices: list[Request]) -> None:
        """Queue the choices of a new request: all, or none if that fails."""
        self._alive[choices[0].id] = choices
        try:
            for choice in choices:
                self._policy.arrive(choice)
                self.waiting.push(choice)
        except BaseException:
            del self._alive[choices[0].id]
            for choice in choices:
                self._policy.end(choice)
            alive = (request for others in self._alive.values() for request in others)
            self.waiting.refill(request for request in alive if request.slot < 0 and request.finish is None)
            raise
        self._watchers.tell("queued", choices)

    def start(self, request: Request) -> None:
        """Give a slot to a request that was taken from the queue."""
        request.slot = self._free_slots.pop()
        self._policy.begin(request)
        bisect.insort(self.running, request, key=self._policy.rank)
        self.kv.admitted(request)
        self._watchers.tell("admitted", request)

    def preempt(self, request: Request, cause: PreemptionCause, by: Request | None) -> None:
        """Release slot and blocks, for `by`, and queue the request again. Its full blocks stay cached."""
        self._watchers.tell("preempted", request, cause, by)
        self._give_back(request)
        _begin_anew(request)
        self.waiting.push(request)

    def end(self, request: Request) -> None:
        """End a request. Release its slot and blocks now if no launched step holds them, else `release` does later."""
        self._watchers.tell("ended", request)
        if request.slot < 0:
            self.waiting.discard()
            self._forget(request)
        elif not request.inflight:
            self.release(request)

    def release(self, request: Request) -> None:
        """Release slot and blocks of a request that has ended, and forget it."""
        if self._finishing and request.finish is not FinishReason.ERROR:
            finished(self._finishing, request, self._cache)
        self._give_back(request)
        self._forget(request)

    def rebuild(self, lost: Collection[Request] = ()) -> None:
        """Rebuild queue, slots and block counts from the requests, since a failure may have left them inconsistent.

        A request with a slot keeps it and the blocks of its table, unless it has ended and no launched step holds it.
        All others hold nothing, and wait or are forgotten. All cached contents are forgotten.

        Args:
            lost: requests with a slot whose launched steps are lost. They wait again.
        """
        for request in lost:
            if request.finish is None:
                self._watchers.tell("preempted", request, PreemptionCause.FAILED_STEP, None)
            request.inflight = 0
            _begin_anew(request)
        alive = [request for choices in self._alive.values() for request in choices]
        seated = {r for r in alive if r.slot >= 0 and (r.finish is None or r.inflight) and r not in lost}
        ended = [r for r in alive if r.finish is not None and r not in seated]
        for request in alive:
            if request not in seated:
                request.slot, request.table = -1, BlockTable()
                request.num_computed = request.pending = request.num_drafts = request.unsure = 0
        self._cache.recount([request.table for request in seated])
        self.running[:] = sorted(seated, key=self._policy.rank)
        self.waiting.refill(request for request in alive if request.slot < 0 and request.finish is None)
        taken = {request.slot for request in seated}
        self._free_slots = [slot for slot in range(self._num_slots - 1, -1, -1) if slot not in taken]
        for request in ended:
            self._forget(request)
        self.kv.rebuild()

    def _give_back(self, request: Request) -> None:
        if request.inflight:
            raise AssertionError(f"request {request.id} has {request.inflight} steps in flight and can't be freed")
        if request.finish is not FinishReason.ERROR:
            self.kv.register(request)
        self._cache.release(request.table)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.siblings.take_moved(request)  # admission fills its next slot anyway
        request.slot = -1

    def _forget(self, request: Request) -> None:
        self._policy.end(request)
        self.kv.forget(request)
        released(self._hooks, request)
        if all(r.finish is not None and r.slot < 0 for r in self._alive.get(request.id, ())):
            self._alive.pop(request.id, None)
            request.siblings.part()


def _begin_anew(request: Request) -> None:
    """Reset its counters: none of its tokens is computed any more."""
    request.num_lost = request.num_computed
    request.num_preemptions += 1
    request.num_computed = request.pending = request.num_drafts = request.unsure = 0
