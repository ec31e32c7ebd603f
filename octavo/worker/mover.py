"""`Mover`: moves pages between the KV cache and the tiers' worker halves, while steps are computed.

A store copies blocks to the host's memory on a stream of its own and hands them to the tier. A load has the tier fill
the host's memory, and then copies it into blocks on that stream (`loads.py`). Stores go on between steps: whatever has
ended by then takes its next step, and what has not is looked at again. No step waits for a load: a tier that names
`rooms` is given memory that was reserved at the start, in which larger loads take turns in parts; other tiers allocate
memory in their threads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import Copy, Link
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import WorkerHook
from octavo.worker.loads import Failed, Loads

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Store:
    """First `copy` ends, then `kept`."""

    transfer: Transfer
    copy: Copy
    kept: Failed | None = None


class Mover:
    """All transfers of one worker.

    Args:
        link: of the device that has the blocks.
        tiers: name of a feature -> its worker half.
    """

    def __init__(self, blocks: Blocks, link: Link, tiers: Mapping[str, WorkerHook]) -> None:
        self._blocks = blocks
        self._copier = link.copier()
        self._tiers = tiers
        self._stores: dict[int, _Store] = {}
        self._news: deque[Moved] = deque()
        # Not by a method, which would be a cycle: rooms are freed with the last reference, without a collection.
        self._loads = Loads(blocks, self._copier, tiers, partial(_report, self._news))

    def begin(self, transfers: Transfers) -> None:
        """Begin transfers. One that can't be begun has failed; nothing is raised."""
        for ticket in transfers.doubted:
            if ticket not in self._stores and ticket not in self._loads:
                self._news.append(Moved(ticket, TransferState.UNKNOWN))
        for transfer in transfers.stores:
            self._try(transfer, partial(self._begin_store, transfer))
        for transfer in transfers.loads:
            self._loads.begin(transfer)
        self.advance()

    def advance(self) -> None:
        """Have each transfer take its next step, if the one before has ended."""
        for store in list(self._stores.values()):
            self._try(store.transfer, partial(self._advance_store, store))
        self._loads.advance()

    def take(self) -> list[Moved]:
        """Return what has happened since the last call."""
        self.advance()
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """Wait for copies under way, since the blocks' memory is freed next. What has not ended is never reported."""
        for store in self._stores.values():
            with suppress(Exception):  # from a lost device, which copies nothing any more
                store.copy.wait()
        self._stores.clear()
        self._loads.close()

    def _begin_store(self, transfer: Transfer) -> None:
        copy = self._copier.out(partial(self._blocks.gather, transfer.blocks))
        self._stores[transfer.ticket] = _Store(transfer, copy)

    def _advance_store(self, store: _Store) -> None:
        transfer = store.transfer
        if store.kept is None and store.copy.done():
            store.kept = self._tiers[transfer.tier].store(transfer.pages, store.copy.wait())
            if not store.kept.done():
                self._news.append(Moved(transfer.ticket, TransferState.READ))
        if store.kept is not None and store.kept.done():
            self._end(transfer, store.kept.result())

    def _end(self, transfer: Transfer, failed: Collection[int]) -> None:
        """End a store."""
        self._stores.pop(transfer.ticket, None)
        _report(self._news, transfer, failed)

    def _try(self, transfer: Transfer, work: Callable[[], None]) -> None:
        """A failure is the tier's own, and the end of this store."""
        try:
            work()
        except Exception:
            log.exception("the tier %r failed to move %d pages", transfer.tier, len(transfer.pages))
            self._end(transfer, range(len(transfer.pages)))


def _report(news: deque[Moved], transfer: Transfer, failed: Collection[int]) -> None:
    """Report the end of a transfer. May be called in any thread."""
    news.append(Moved(transfer.ticket, TransferState.ENDED, sorted(failed)))
