"""`Tiers`: loads of prefixes that waiting requests lack, and stores of blocks that were computed.

Blocks are stored when the step that filled them has been taken in, not when they are evicted: eviction costs nothing
more, and what a failed step wrote is never stored. A store holds its blocks until they are read.

A load belongs to no request. It leases the whole prefix, registers it when all of it has arrived, and holds it until
the requests that wait for it are admitted. So a request can end while its prefix is being loaded, and several can wait
for one load.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.cache.cache import KVCache
from octavo.cache.lease import Lease
from octavo.cache.prefix_tree import Key
from octavo.cache.prefixes import Extension
from octavo.cache.table import BlockTable
from octavo.cache.tier import BlockNames, Tier, page_name
from octavo.core.cache_groups import NO_BLOCK, CacheGroup
from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.schedule.counters import Counters
from octavo.schedule.request import Request

log = logging.getLogger(__name__)

_STORED_PART, _STORED_ANYWAY = 8, 1024
"""Blocks that are on their way to a tier are at most this part of the cache, or this number if it is at most half of
it: a step of 8,192 tokens can fill 512 blocks."""


@dataclass(slots=True, eq=False)
class Load:
    """A prefix that is being loaded.

    Attributes:
        until: when its requests stop waiting, on the clock of `Tiers`.
        waiting: requests that wait for it, or are not admitted since it arrived.
        void: what it loads is of no use any more.
    """

    transfer: Transfer
    lease: Lease
    namespace: str
    keys: Sequence[Key]
    until: float
    waiting: set[Request] = field(default_factory=set)
    void: bool = False


@dataclass(slots=True, eq=False)
class Store:
    """Blocks that are being stored.

    Attributes:
        before: of each page; see `Tier.stored`.
        void: the tier does not get it any more.
    """

    transfer: Transfer
    lease: Lease
    before: list[bytes]
    void: bool = False


class Tiers:
    """All transfers of one engine.

    Args:
        tiers: where prefixes are looked for, in this order; blocks are stored in all of them.
        clock: seconds.
        tickets: numbers for transfers.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        cache: KVCache,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        tickets: Iterator[int] | None = None,
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._owners = {tier.name: f"transfers of {tier.name}" for tier in tiers}
        self._cache = cache
        self._counters = counters
        self._clock = clock
        self._realm = ""
        self._tickets = itertools.count() if tickets is None else tickets
        self._names: dict[Request, tuple[list[int], str, Sequence[tuple[int, bytes]], BlockNames]] = {}
        """With what the names are of: the list of tokens, which siblings in lockstep exchange, the namespace, and the
        marks."""
        self._unsent: dict[int, Load] = {}
        self._loads: dict[int, Load] = {}
        self._arriving: dict[bytes, Load] = {}
        """Page -> the load that brings it."""
        self._arrived: dict[Load, None] = {}
        """Loads that have ended and hold their blocks for requests to be admitted."""
        self._waiting: dict[Request, Load] = {}
        self._given_up: set[Request] = set()
        """Requests that compute their prompts because a load failed or was late."""
        self._filling: list[Store] = []
        """Stores of blocks that the step in the making fills, then by launched step, then those that can begin."""
        self._filled: dict[int, list[Store]] = {}
        self._ready: list[Store] = []
        self._stores: dict[int, Store] = {}
        self._unread: set[int] = set()
        self._storing: dict[str, set[bytes]] = {name: set() for name in self._tiers}
        self._doubted: list[int] = []

    def enter(self, realm: str) -> None:
        """Name pages after this realm from now on; see `BlockNames`."""
        self._realm = realm
        self._names.clear()

    @property
    def active(self) -> bool:
        """Whether transfers hold blocks and have not reported yet, so that plans must be made."""
        return bool(self._loads or self._unsent or self._ready or self._unread)

    @property
    def storing(self) -> bool:
        """Whether computed pages are not in their tier yet."""
        return bool(self._filled or self._ready or self._stores)

    # Loads

    def waits(self, request: Request) -> bool:
        """Whether a waiting request's prefix is being loaded, in time."""
        load = self._waiting.get(request)
        if load is None or load in self._arrived:
            return False
        if self._clock() < load.until:
            return True
        self._counters.stats.loads_late += 1
        self._give_up(request)
        return False

    def load(self, request: Request) -> bool:
        """Load what a tier has of a request's prefix and the cache has not; False if that is nothing."""
        if request in self._given_up:
            return False
        keys = request.keys
        names = self._names_of(request).upto(keys, (len(keys) - 1) // self._cache.block_size)
        started = (self._begin(tier, request, keys, names) for tier in self._tiers.values())
        load = next((one for one in started if one is not None), None)
        if load is None:
            return False
        self._admitted_or_gone(request)
        self._waiting[request] = load
        load.waiting.add(request)
        return True

    def awaited(self, request: Request) -> tuple[str, int]:
        """Return the tier that a request waits for, and the length of the prefix that it will have then, in tokens."""
        load = self._waiting[request]
        return load.transfer.tier, load.lease.num_tokens

    def admitted(self, request: Request) -> None:
        """The request holds what it shares; what was loaded for it need not be held any longer."""
        self._no_longer_waits(request)
        options = request.spec.options
        wanting = [tier for tier in self._tiers.values() if options and self._ask(tier, "wants_shared", options)]
        if wanting:
            # Steps that are in flight may write some of them.
            self._keep(request, _shared(self._cache.groups, request.table), wanting, computed=False)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self._no_longer_waits(request)
        self._names.pop(request, None)

    def _no_longer_waits(self, request: Request) -> None:
        self._admitted_or_gone(request)
        self._given_up.discard(request)

    def let_go(self) -> bool:
        """Hold the blocks of the last arrived load no longer; they stay findable. False if there is none."""
        if not self._arrived:
            return False
        load = next(reversed(self._arrived))
        for request in load.waiting:
            del self._waiting[request]
        load.waiting.clear()
        self._end(load)
        return True

    def _begin(self, tier: Tier, request: Request, keys: Sequence[Key], names: Sequence[bytes]) -> Load | None:
        """Begin the load from a tier that makes the longest prefix; return it, or the one that brings a part of it."""
        found = self._cache.extension(
            request.namespace, keys, lambda group, index: self._ask(tier, "holds", page_name(names[index], group))
        )
        if found is None or found.num_tokens <= request.num_computed:
            return None
        pages = [page_name(names[index], group) for group, _, index in found.missing]
        other = next((self._arriving[page] for page in pages if page in self._arriving), None)
        return other or self._reserve(tier, request.namespace, keys, found, pages)

    def _reserve(
        self, tier: Tier, namespace: str, keys: Sequence[Key], found: Extension, pages: list[bytes]
    ) -> Load | None:
        lease = self._cache.reserve(found, self._owners[tier.name])
        if lease is None:
            return None
        blocks = [lease.groups[group][entry] for group, entry, _ in found.missing]
        transfer = Transfer(next(self._tickets), tier.name, pages, blocks)
        until = self._clock() + tier.deadline_s
        load = Load(transfer, lease, namespace, tuple(keys[: found.num_tokens]), until)
        self._unsent[transfer.ticket] = load
        self._arriving.update(dict.fromkeys(pages, load))
        return load

    def _loaded(self, load: Load, news: Moved) -> None:
        pages = load.transfer.pages
        self._no_longer_arriving(load)
        if news.failed or news.state is TransferState.UNKNOWN:
            self._counters.stats.loads_failed += 1
            if news.failed:
                self._tell(load.transfer.tier, "lost", [pages[index] for index in news.failed])
            for request in list(load.waiting):
                self._give_up(request)
        else:
            self._counters.stats.blocks_loaded += len(pages)
            if not load.void:
                self._cache.adopt(load.lease, load.namespace, load.keys)
                self._arrived[load] = None
        if not load.waiting:
            self._end(load)
        del self._loads[news.ticket]

    def _no_longer_arriving(self, load: Load) -> None:
        for page in load.transfer.pages:
            if self._arriving.get(page) is load:
                del self._arriving[page]

    def _give_up(self, request: Request) -> None:
        self._admitted_or_gone(request)
        self._given_up.add(request)

    def _admitted_or_gone(self, request: Request) -> None:
        """Nobody holds a load's blocks for this request any more."""
        load = self._waiting.pop(request, None)
        if load is not None:
            load.waiting.discard(request)
            if load in self._arrived and not load.waiting:
                self._end(load)

    def _end(self, load: Load) -> None:
        load.lease.release()
        self._arrived.pop(load, None)

    # Stores

    def store(self, request: Request, registered: Sequence[tuple[int, list[int]]]) -> None:
        """Store blocks that were just registered, (index in the sequence, block by group), when they are computed."""
        options = request.spec.options
        wanting = [tier for tier in self._tiers.values() if self._ask(tier, "wants", options)]
        if wanting:
            self._keep(request, registered, wanting, computed=not request.inflight)

    def _keep(
        self, request: Request, registered: Sequence[tuple[int, list[int]]], tiers: Sequence[Tier], *, computed: bool
    ) -> None:
        if not registered:
            return
        names = self._names_of(request).upto(request.keys, registered[-1][0] + 1)
        pages = {
            page_name(names[index], group): (block, page_name(names[index - 1], group) if index else b"")
            for index, blocks in registered
            for group, block in enumerate(blocks)
            if block != NO_BLOCK
        }
        for tier in tiers:
            storing = self._storing[tier.name]
            wanted = [page for page in pages if page not in storing and self._ask(tier, "lacks", page)]
            total = self._cache.num_blocks
            most = max(total // _STORED_PART, min(total // 2, _STORED_ANYWAY))
            room = max(0, most - len(self._storing[tier.name]))
            self._counters.stats.blocks_not_stored += len(wanted[room:])
            if wanted[:room]:
                self._store(tier, wanted[:room], pages, computed=computed)

    def _store(self, tier: Tier, wanted: list[bytes], pages: dict[bytes, tuple[int, bytes]], *, computed: bool) -> None:
        blocks, before = map(list, zip(*(pages[page] for page in wanted), strict=True))
        lease = self._cache.lease_blocks(blocks, self._owners[tier.name])
        store = Store(Transfer(next(self._tickets), tier.name, wanted, blocks), lease, before)
        self._storing[tier.name].update(wanted)
        self._tell(tier.name, "storing", wanted)
        (self._ready if computed else self._filling).append(store)

    def _stored(self, store: Store, news: Moved) -> None:
        store.lease.release()
        self._unread.discard(news.ticket)
        if news.state is TransferState.READ:
            return
        pages = store.transfer.pages
        self._storing[store.transfer.tier].difference_update(pages)
        none = store.void or news.state is TransferState.UNKNOWN
        failed = set(range(len(pages)) if none else news.failed)
        self._counters.stats.blocks_not_stored += len(failed)
        self._counters.stats.blocks_stored += len(pages) - len(failed)
        kept = [i for i in range(len(pages)) if i not in failed]
        if failed:
            self._tell(store.transfer.tier, "not_stored", [pages[i] for i in sorted(failed)])
        if kept:
            self._tell(store.transfer.tier, "stored", [pages[i] for i in kept], [store.before[i] for i in kept])
        del self._stores[news.ticket]

    def reset(self) -> None:
        """What is being stored is forgotten, like all cached contents."""
        for store in self._all_stores():
            store.void = True

    def _all_stores(self) -> Iterator[Store]:
        yield from (*self._filling, *itertools.chain(*self._filled.values()), *self._ready, *self._stores.values())

    # Plans and their outputs

    def take(self, *, ask: bool) -> Transfers | None:
        """Return what the next plan is to begin; None for nothing.

        Args:
            ask: nothing is computed whose output would bring news, so a plan is needed to ask for them.
        """
        if not (self._unsent or self._ready or self._doubted or (ask and (self._loads or self._stores))):
            return None
        for store in self._ready:
            self._stores[store.transfer.ticket] = store
            self._unread.add(store.transfer.ticket)
        plan = Transfers(
            [load.transfer for load in self._unsent.values()],
            [store.transfer for store in self._ready],
            self._doubted,
        )
        self._loads |= self._unsent
        self._unsent, self._ready, self._doubted = {}, [], []
        return plan

    def launched(self, step: int) -> None:
        """A plan was made: with its step, blocks registered for it are filled."""
        if self._filling:
            self._filled[step], self._filling = self._filling, []

    def committed(self, step: int, moved: Sequence[Moved]) -> None:
        """A step's output was taken in, with this news of transfers."""
        self._ready += self._filled.pop(step, ())
        for news in moved:
            if (load := self._loads.get(news.ticket)) is not None:
                self._loaded(load, news)
            elif (store := self._stores.get(news.ticket)) is not None:
                self._stored(store, news)

    def rebuild(self) -> None:
        """Derive waiting requests and leases from the transfers: a failure may have left them half changed."""
        for load in (*self._unsent.values(), *self._loads.values(), *self._arrived):
            load.waiting = {request for request in load.waiting if self._waiting.get(request) is load}
        for load in list(self._arrived):
            if not load.waiting:
                self._end(load)
        stores = list(self._all_stores())
        loads = (*self._unsent.values(), *self._loads.values(), *self._arrived)
        held = {load.lease for load in loads} | {store.lease for store in stores}
        for lease in list(self._cache.leases):
            if lease.owner in self._owners.values() and lease not in held:
                lease.release()
        for name, pages in self._storing.items():
            pages.intersection_update(
                page for store in stores if store.transfer.tier == name for page in store.transfer.pages
            )
        self._unread.intersection_update(self._stores)

    def lost(self) -> None:
        """Launched steps are lost, and the prefix tree is empty; reference counts of blocks are right.

        Prefixes that are being loaded may continue blocks that were not computed. What the worker knows of the
        transfers that it was sent is asked for with the next plan.
        """
        self._unsent, self._filling, self._filled = {}, [], {}
        self._arrived.clear()
        self._arriving.clear()
        self._waiting.clear()
        for load in self._loads.values():
            load.void = True
        self.rebuild()
        self._doubted = [*self._loads, *self._stores]

    def clear(self) -> None:
        """The blocks lose their contents; no step is launched and no transfer holds a block."""
        self._ready = []
        self.lost()

    # Names and features

    def names(self, request: Request) -> Sequence[bytes]:
        """Return the names of the full blocks of an admitted or waiting request's tokens."""
        count = len(request.keys) // self._cache.block_size
        return self._names_of(request).upto(request.keys, count)[:count]

    def _names_of(self, request: Request) -> BlockNames:
        known = self._names.get(request)
        of = request.namespace, request.marks
        if known is None or known[0] is not request.tokens or known[1:3] != of:
            names = BlockNames(self._realm, request.namespace, self._cache.block_size)
            known = self._names[request] = request.tokens, *of, names
        return known[3]

    def _ask(self, tier: Tier, what: str, about: bytes | Mapping[str, msgspec.Raw]) -> bool:
        """Call `Tier.holds`, `lacks`, `wants` or `wants_shared`; False if that fails."""
        try:
            return bool(getattr(tier, what)(about))
        except Exception:
            log.exception("the tier %r failed to answer %r", tier.name, what)
            return False

    def _tell(self, name: str, what: str, *pages: list[bytes]) -> None:
        """Call `Tier.stored`, `not_stored` or `lost`. A failure is the feature's own."""
        try:
            getattr(self._tiers[name], what)(*pages)
        except Exception:
            log.exception("the tier %r failed to take in that pages were %s", name, what.replace("_", " "))


def _shared(groups: Sequence[CacheGroup], table: BlockTable) -> list[tuple[int, list[int]]]:
    """Return what a table that was just matched shares, as (index in the sequence, block by group)."""
    last = table.num_registered - 1
    rows = list(zip(groups, table.groups, strict=True)) if last >= 0 else []
    return [
        (i, [row[i] if group.grows else row[0] if i == last else NO_BLOCK for group, row in rows])
        for i in range(table.num_registered)
    ]
