"""`Mover`: moves pages between the KV cache and the tiers' worker halves, while steps are computed.

A store copies blocks to the host's memory on a stream of its own and hands them to the tier. A load has the tier fill
the host's memory, and then copies it into blocks on that stream. Everything goes on between steps: whatever has ended
by then takes its next step, and what has not is looked at again. No step waits for a load: a tier that names `rooms` is
given memory that was reserved at the start, in which larger loads take turns in parts; other tiers' loads are allocated
in the tier's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import Copier, Copy, Link, Mark
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
    """Memory for pages of a load, which the tier takes in a thread of its own: a part of `reserved`, or new.

    Args:
        count: of the pages.
        reserved: [pages, page bytes] uint8; None if it is allocated when it is taken.
    """

    def __init__(self, copier: Copier, count: int, page_bytes: int, reserved: Tensor | None) -> None:
        self.reserved = reserved
        self._copier = copier
        self._shape = count, page_bytes
        self._pages: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._pages is not None:
            raise AssertionError("a load has one room")
        count, _ = self._shape
        self._pages = self._copier.room(*self._shape) if self.reserved is None else self.reserved[:count]
        return self._pages

    @property
    def pages(self) -> Tensor:
        if self._pages is None:
            raise AssertionError("a tier loaded pages without taking room for them")
        return self._pages


@dataclass(slots=True)
class _Part:
    """Consecutive pages of a load, from index `first` on. First `read` ends, then `copy`."""

    first: int
    blocks: list[int]
    room: _Room
    read: Failed
    copy: Copy | None = None


@dataclass(slots=True)
class _Load:
    """A load in parts of the size of a room.

    Attributes:
        after: the steps that may use the blocks' former contents. Copies wait for them, and for no later step.
        begun: pages of the parts so far.
        parts: those under way.
        failed: indices of pages that could not be loaded. If there are any, no further part begins and none is copied.
    """

    transfer: Transfer
    after: Mark | None
    begun: int = 0
    parts: list[_Part] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        return not self.parts and (bool(self.failed) or self.begun == len(self.transfer.pages))


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
        self._rooms: dict[str, list[Tensor]] = {}
        """Those of each tier that no load has; only of tiers that name some."""
        self._most: dict[str, int] = {}
        """Pages of such a room."""
        for name, tier in tiers.items():
            pages, count = tier.rooms(blocks.page_bytes)
            if pages and count:
                self._rooms[name] = [self._copier.room(pages, blocks.page_bytes) for _ in range(count)]
                self._most[name] = pages
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
            self._loads[transfer.ticket] = _Load(transfer, self._copier.mark())
        self.advance()

    def advance(self) -> None:
        """Have each transfer take its next step, if the one before has ended."""
        for store in list(self._stores.values()):
            self._try(store.transfer, partial(self._advance_store, store))
        for load in list(self._loads.values()):
            self._advance_load(load)

    def take(self) -> list[Moved]:
        """Return what has happened since the last call."""
        self.advance()
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Wait for copies under way, since the blocks' memory is freed next. What has not ended is never reported."""
        copies: list[Copy | None] = [store.copy for store in self._stores.values()]
        copies += [part.copy for load in self._loads.values() for part in load.parts]
        for copy in copies:
            if copy is not None:
                with suppress(Exception):  # from a lost device, which copies nothing any more
                    copy.wait()
        self._stores.clear()
        self._loads.clear()

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

    def _advance_load(self, load: _Load) -> None:
        going = True
        while going:
            self._begin_parts(load)
            over = [part for part in load.parts if self._is_over(load, part)]
            for part in over:
                load.parts.remove(part)
                if part.room.reserved is not None:
                    self._rooms[load.transfer.tier].append(part.room.reserved)
            going = bool(over)
        if load.ended:
            self._end(load.transfer, load.failed)

    def _begin_parts(self, load: _Load) -> None:
        """Begin parts of a load while there are rooms."""
        transfer = load.transfer
        rooms, total = self._rooms.get(transfer.tier), len(transfer.pages)
        while load.begun < total and not load.failed and (rooms is None or rooms):
            first, end = load.begun, total
            reserved = None
            if rooms is not None:
                end = min(end, first + self._most[transfer.tier])
                reserved = rooms[-1]
            room = _Room(self._copier, end - first, self._blocks.page_bytes, reserved)
            try:
                read = self._tiers[transfer.tier].load(transfer.pages[first:end], room)
            except Exception:
                self._fail(load)
                return
            if rooms is not None:
                rooms.pop()
            load.parts.append(_Part(first, transfer.blocks[first:end], room, read))
            load.begun = end

    def _is_over(self, load: _Load, part: _Part) -> bool:
        """Take a part's next step; return whether nothing reads or writes its memory and its blocks any more."""
        try:
            if part.copy is None and part.read.done():
                load.failed.update(part.first + index for index in part.read.result())
                if load.failed:
                    return True
                scatter = partial(self._blocks.scatter, part.blocks)
                part.copy = self._copier.into(part.room.pages, scatter, load.after)
            return part.copy is not None and part.copy.done()
        except Exception:
            self._fail(load)
            return True

    def _fail(self, load: _Load) -> None:
        """Have a load end as failed, after the exception that is being handled: the tier's own."""
        transfer = load.transfer
        log.exception("the tier %r failed to move %d pages", transfer.tier, len(transfer.pages))
        load.failed.update(range(len(transfer.pages)))

    def _end(self, transfer: Transfer, failed: Collection[int] = ()) -> None:
        self._stores.pop(transfer.ticket, None)
        self._loads.pop(transfer.ticket, None)
        self._news.append(Moved(transfer.ticket, TransferState.ENDED, sorted(failed)))

    def _try(self, transfer: Transfer, work: Callable[[], None]) -> None:
        """A failure is the tier's own, and the end of this store."""
        try:
            work()
        except Exception:
            log.exception("the tier %r failed to move %d pages", transfer.tier, len(transfer.pages))
            self._end(transfer, range(len(transfer.pages)))
