"""`Pages`: KV blocks that hold a feature's own data, such as weights, in place of keys and values.

Requests and features take blocks from one pool. A feature gets a block by a lease, has its worker half fill it while
other steps run (`WorkerHook.load`), and gives it back when requests lack blocks (`EngineHook.reclaim`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from octavo.cache.cache import KVCache
from octavo.cache.lease import Lease
from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.schedule.request import Request

log = logging.getLogger(__name__)

HookCall = Callable[[str, str, Mapping[str, Any]], Future[list[Any]]]
"""(feature, method, arguments) -> the result of each rank's `WorkerHook.call`."""

Loaded = Callable[[bool], None]
"""Called at the end of a load, between steps, with whether all of it arrived."""


_OWNER = "pages of "


class PageLoads:
    """The loads of all features' pages.

    Args:
        tickets: numbers of transfers; those of tiers are from the same iterator.

    Attributes:
        possible: whether there are blocks to load into; not while the engine sleeps.
    """

    def __init__(self, tickets: Iterator[int]) -> None:
        self.possible = True
        self._tickets = tickets
        self._unsent: dict[int, tuple[Transfer, Loaded]] = {}
        self._sent: dict[int, tuple[Transfer, Loaded]] = {}
        self._doubted: list[int] = []

    @property
    def active(self) -> bool:
        """Whether loads have not reported yet, so that plans must be made."""
        return bool(self._unsent or self._sent)

    def begin(self, feature: str, names: Sequence[bytes], blocks: Sequence[int], loaded: Loaded) -> None:
        """Begin a load with the next plan."""
        ticket = next(self._tickets)
        self._unsent[ticket] = Transfer(ticket, feature, list(names), list(blocks)), loaded

    def take(self, *, ask: bool) -> Transfers | None:
        """Return what the next plan is to begin; None for nothing. `ask` as in `Tiers.take`."""
        if not (self._unsent or self._doubted or (ask and self._sent)):
            return None
        plan = Transfers(loads=[transfer for transfer, _ in self._unsent.values()], doubted=self._doubted)
        self._sent |= self._unsent
        self._unsent, self._doubted = {}, []
        return plan

    def committed(self, moved: Sequence[Moved]) -> None:
        """A step's output was taken in, with this news of transfers.

        A failure ends no step and no request. If the feature was not told, the next plan asks for the load again.
        """
        for news in moved:
            if news.ticket not in self._sent:
                continue
            transfer, loaded = self._sent[news.ticket]
            try:
                self._tell(transfer, loaded, whole=not news.failed and news.state is TransferState.ENDED)
            except Exception:
                log.exception("the feature %r failed to take in that its pages were loaded", transfer.tier)
                if news.ticket in self._sent:
                    self._doubted.append(news.ticket)

    def lost(self) -> None:
        """Launched steps are lost, and with them what the worker knows of loads; the next plan asks for it."""
        self._doubted = list(self._sent)

    def _tell(self, transfer: Transfer, loaded: Loaded, *, whole: bool) -> None:
        """End a load. It is removed right before the call, so that `loaded` is called exactly once."""
        del self._sent[transfer.ticket]
        loaded(whole)


class Pages:
    """What one feature can do with blocks; see `EngineHook.attach`."""

    def __init__(
        self,
        feature: str,
        cache: KVCache,
        shortage: Callable[[Request], int],
        loads: PageLoads,
        call: HookCall,
        names: Callable[[Request], Sequence[bytes]],
    ) -> None:
        """
        Args:
            shortage: blocks missing to admit a request, as of now; negative if some are left over.
            call: `WorkerPort.call_hook`.
            names: see `names`.
        """
        self._owner = _OWNER + feature
        self._feature = feature
        self._cache = cache
        self._shortage = shortage
        self._loads = loads
        self._call = call
        self._names = names

    @property
    def awake(self) -> bool:
        """Whether there are blocks, and a worker half that `call` reaches; not while the engine sleeps."""
        return self._loads.possible

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, used ones included."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self._cache.block_size

    @property
    def groups(self) -> int:
        """Kinds of layers that keep blocks of their own."""
        return len(self._cache.groups)

    def names(self, request: Request) -> Sequence[bytes]:
        """Return the names that tiers have for the full blocks of a request's tokens; see `cache/tier.py`.

        Another engine with the same model and settings has the same names. None for a request that a feature's
        `namespace` or `mark` sets apart, and without tiers. Right in `admit` and after it.
        """
        return self._names(request)

    def missing(self, count: int, request: Request | None = None) -> int:
        """Return the blocks that lack for `count` blocks and then for the request to be admitted; <= 0 if none do.

        All of them lack while the engine sleeps.
        """
        if not self._loads.possible:
            return max(1, count)
        return count - self._cache.num_free if request is None else count + self._shortage(request)

    def take(self, count: int) -> Lease | None:
        """Take blocks, evicting cached prefixes, least recently used first; None if too few are free.

        Release the lease when no launched step reads the blocks: no request that uses them has a slot.
        """
        return self._cache.lease_new(count, self._owner) if self._loads.possible else None

    def load(self, names: Sequence[bytes], blocks: Sequence[int], loaded: Loaded) -> None:
        """Have the worker half's `load` fill blocks under these names while steps run.

        The blocks must stay leased, and be read by no step, until `loaded` is called. If this raises, no load was
        begun, and the caller releases the blocks.
        """
        self._loads.begin(self._feature, names, blocks, loaded)

    def call(self, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        """Call the worker half in each rank; see `WorkerPort.call_hook`. Fails unless `awake`."""
        return self._call(self._feature, method, args)


def is_pages(lease: Lease) -> bool:
    """Whether the lease was taken by `Pages.take`, so that its feature gives it back when it must."""
    return lease.owner.startswith(_OWNER)


def merged(first: Transfers | None, second: Transfers | None) -> Transfers | None:
    """Return both together."""
    if first is None or second is None:
        return first or second
    return Transfers([*first.loads, *second.loads], [*first.stores, *second.stores], [*first.doubted, *second.doubted])


def tickets() -> Iterator[int]:
    """Return the numbers of an engine's transfers."""
    return itertools.count()
