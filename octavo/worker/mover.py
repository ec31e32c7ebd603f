"""`Mover`: moves pages between the KV cache and the tiers' worker halves, while steps are computed.

A store copies blocks to the host's memory on a stream of its own and hands them to the tier. A load has the tier fill
the host's memory, and then copies it into blocks on that stream. Everything goes on between steps: whatever has ended
by then takes its next step, and what has not is looked at again. No step waits for a load: its memory is reserved at
the start, or else allocated in the tier's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import Copier, Copy, Link
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import WorkerHook

log = logging.getLogger(__name__)

Failed = Future[Collection[int]]
"""Indices of pages that a tier could not move."""


@dataclass(slots=True)
class _Store:
    """First `copy` ends, then `kept`."""

    transfer: Transfer
    copy: Copy
    kept: Failed | None = None


class _Room:
    """Memory for the pages of a load, which the tier takes in a thread of its own."""

    def __init__(self, copier: Copier, *shape: int) -> None:
        self._copier = copier
        self._shape = shape
        self._pages: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._pages is not None:
            raise AssertionError("a load has one room")
        self._pages = self._copier.room(*self._shape)
        return self._pages

    @property
    def pages(self) -> Tensor:
        if self._pages is None:
            raise AssertionError("a tier loaded pages without taking room for them")
        return self._pages

    def give_back(self) -> None:
        if self._pages is not None:
            self._copier.give_back(self._pages)


@dataclass(slots=True)
class _Load:
    """First `read` ends, then `copy`."""

    transfer: Transfer
    room: _Room
    read: Failed
    copy: Copy | None = None


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
        for tier in tiers.values():
            pages, count = tier.rooms(blocks.page_bytes)
            self._copier.reserve(pages * blocks.page_bytes, count)
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._news: list[Moved] = []

    def begin(self, transfers: Transfers) -> None:
        """Begin transfers. One that can't be begun has failed; nothing is raised."""
        for ticket in transfers.doubted:
            if ticket not in self._stores and ticket not in self._loads:
                self._news.append(Moved(ticket, TransferState.UNKNOWN))
        for transfer in transfers.stores:
            self._try(transfer, partial(self._begin_store, transfer))
        for transfer in transfers.loads:
            self._try(transfer, partial(self._begin_load, transfer))
        self._advance()

    def take(self) -> list[Moved]:
        """Return what has happened since the last call."""
        self._advance()
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Wait for copies under way, since the blocks' memory is freed next. What has not ended is never reported."""
        copies = [*(store.copy for store in self._stores.values()), *(load.copy for load in self._loads.values())]
        for copy in copies:
            if copy is not None:
                with suppress(Exception):  # from a lost device, which copies nothing any more
                    copy.wait()
        self._stores.clear()
        self._loads.clear()

    def _begin_store(self, transfer: Transfer) -> None:
        copy = self._copier.out(partial(self._blocks.gather, transfer.blocks))
        self._stores[transfer.ticket] = _Store(transfer, copy)

    def _begin_load(self, transfer: Transfer) -> None:
        room = _Room(self._copier, len(transfer.pages), self._blocks.page_bytes)
        read = self._tiers[transfer.tier].load(transfer.pages, room)
        self._loads[transfer.ticket] = _Load(transfer, room, read)

    def _advance(self) -> None:
        for store in list(self._stores.values()):
            self._try(store.transfer, partial(self._advance_store, store))
        for load in list(self._loads.values()):
            self._try(load.transfer, partial(self._advance_load, load))

    def _advance_store(self, store: _Store) -> None:
        transfer = store.transfer
        if store.kept is None and store.copy.done():
            store.kept = self._tiers[transfer.tier].store(transfer.pages, store.copy.wait())
            if not store.kept.done():
                self._news.append(Moved(transfer.ticket, TransferState.READ))
        if store.kept is not None and store.kept.done():
            self._end(transfer, store.kept.result())

    def _advance_load(self, load: _Load) -> None:
        transfer = load.transfer
        if load.copy is None and load.read.done():
            failed = load.read.result()
            if failed:
                self._end(transfer, failed)
                return
            load.copy = self._copier.into(load.room.pages, partial(self._blocks.scatter, transfer.blocks))
        if load.copy is not None and load.copy.done():
            self._end(transfer)

    def _end(self, transfer: Transfer, failed: Collection[int] = ()) -> None:
        self._stores.pop(transfer.ticket, None)
        load = self._loads.pop(transfer.ticket, None)
        if load is not None:
            load.room.give_back()
        self._news.append(Moved(transfer.ticket, TransferState.ENDED, sorted(failed)))

    def _try(self, transfer: Transfer, work: Callable[[], None]) -> None:
        """A failure is the tier's own, and the end of this transfer."""
        try:
            work()
        except Exception:
            log.exception("the tier %r failed to move %d pages", transfer.tier, len(transfer.pages))
            self._end(transfer, range(len(transfer.pages)))
