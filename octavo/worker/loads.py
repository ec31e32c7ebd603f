"""`Loads`: pages on their way from the tiers' worker halves into the KV cache.

A load is divided into parts of the size of a room. A part is read by its tier, in a thread of that, and then copied
into its blocks. A step can take longer than either, so where copies may begin in any thread, parts do not wait for one:
the thread that has read a part begins to copy it, and while others lack rooms, a thread waits for a copy that ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from octavo.core.plan import Transfer
from octavo.device.transfer import Copier, Copy, Mark
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import WorkerHook

log = logging.getLogger(__name__)

Failed = Future[Collection[int]]
"""Indices of pages that a tier could not move."""
Ended = Callable[[Transfer, Collection[int]], None]
"""Called in any thread at the end of a load, with the indices of pages that could not be loaded."""


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


@dataclass(slots=True, eq=False)
class _Part:
    """Consecutive pages of a load, from index `first` on. First `read` ends, then `copy`."""

    first: int
    blocks: list[int]
    room: _Room
    read: Failed
    copy: Copy | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """
    Attributes:
        after: the steps that may use the blocks' former contents. Copies wait for them, and for no later step.
        turn: parts begin in the order of this; see `Loads.begin`.
        begun: pages of the parts so far.
        parts: those under way.
        failed: indices of pages that could not be loaded. If there are any, no further part begins and none is copied.
    """

    transfer: Transfer
    after: Mark | None
    turn: int
    begun: int = 0
    parts: list[_Part] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether no further part begins."""
        return bool(self.failed) or self.begun == len(self.transfer.pages)

    @property
    def ended(self) -> bool:
        return not self.parts and self.whole


class Loads:
    """All loads of one worker."""

    def __init__(self, blocks: Blocks, copier: Copier, tiers: Mapping[str, WorkerHook], ended: Ended) -> None:
        """
        Args:
            tiers: name of a feature -> its worker half.
        """
        self._blocks = blocks
        self._copier = copier
        self._tiers = tiers
        self._ended = ended
        self._rooms: dict[str, list[Tensor]] = {}
        """Those of each tier that no load has; only of tiers that name some."""
        self._most: dict[str, int] = {}
        """Pages of such a room."""
        for name, tier in tiers.items():
            pages, count = tier.rooms(blocks.page_bytes)
            if pages and count:
                self._rooms[name] = [copier.room(pages, blocks.page_bytes) for _ in range(count)]
                self._most[name] = pages
        self._begun = dict.fromkeys(tiers, 0)
        """Parts so far."""
        self._lock = threading.Lock()
        """Of the loads, their order, their ends and the rooms."""
        self._loads: dict[int, _Load] = {}
        self._order: list[_Load] = []
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="octavo-rooms")
        self._waiting = False
        self._copying: dict[_Part, Copy] = {}
        """In the order in which they end."""

    def __contains__(self, ticket: int) -> bool:
        """Whether a load is under way. If it is not any more, its end has been reported."""
        with self._lock:
            return ticket in self._loads

    def begin(self, transfer: Transfer) -> None:
        """Begin a load, after the steps launched so far; `advance` goes on with it.

        Where loads lack rooms, small ones do not wait for large ones, and those of one size come one after the other.
        None waits for ever, since each counts its parts from those that have begun before it came.
        """
        most = self._most.get(transfer.tier)
        parts = 1 if most is None else -(-len(transfer.pages) // most)
        load = _Load(transfer, self._copier.mark(), self._begun.get(transfer.tier, 0) + parts)
        with self._lock:
            self._loads[transfer.ticket] = load
            self._order.append(load)
            self._order.sort(key=lambda one: one.turn)

    def advance(self) -> None:
        """Have each load take its next step, if the one before has ended. Does nothing while another thread does it,
        since what that one launches may take a while."""
        if self._order and self._lock.acquire(blocking=False):
            try:
                reading = self._advance()
            finally:
                self._lock.release()
            self._follow(reading)

    def close(self) -> None:
        """Wait for copies under way. What has not ended is never reported."""
        with self._lock:
            copies, self._copying = self._copying.values(), {}
            self._loads.clear()
            self._order.clear()
        for copy in copies:
            with suppress(Exception):  # from a lost device, which copies nothing any more
                copy.wait()
        self._waiter.shutdown()

    def _resume(self, _: object = None) -> None:
        """Advance in a thread in which something has ended that nothing else may look at soon."""
        with self._lock:
            reading = self._advance()
        self._follow(reading)

    def _follow(self, reading: Sequence[Failed]) -> None:
        """Have the threads that read parts go on with them. Not with the lock: a part that was read calls back here."""
        if self._copier.anywhere:
            for read in reading:
                read.add_done_callback(self._resume)

    @torch.inference_mode()
    def _advance(self) -> list[Failed]:
        """Advance all loads, with the lock; return what reads the parts that began, for `_follow`."""
        reading: list[Failed] = []
        going = True
        while going:
            for load in self._order:
                reading += self._begin_parts(load)
            going = sum(self._end_parts(load) for load in list(self._order)) > 0
        self._await_room()
        return reading

    def _begin_parts(self, load: _Load) -> list[Failed]:
        """Begin parts of a load while there are rooms; return what reads them."""
        transfer = load.transfer
        rooms, total = self._rooms.get(transfer.tier), len(transfer.pages)
        found: list[Failed] = []
        while not load.whole and (rooms is None or rooms):
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
                break
            if rooms is not None:
                rooms.pop()
            load.parts.append(_Part(first, transfer.blocks[first:end], room, read))
            load.begun = end
            self._begun[transfer.tier] += 1
            found.append(read)
        return found

    def _end_parts(self, load: _Load) -> int:
        """Have the parts of a load take their next steps; return how many have ended."""
        over = [part for part in load.parts if self._is_over(load, part)]
        for part in over:
            load.parts.remove(part)
            self._copying.pop(part, None)
            if part.room.reserved is not None:
                self._rooms[load.transfer.tier].append(part.room.reserved)
        if load.ended:
            del self._loads[load.transfer.ticket]
            self._order.remove(load)
            self._ended(load.transfer, load.failed)
        return len(over)

    def _is_over(self, load: _Load, part: _Part) -> bool:
        """Take a part's next step; return whether nothing reads or writes its memory and its blocks any more."""
        try:
            if part.copy is None and part.read.done():
                load.failed.update(part.first + index for index in part.read.result())
                if load.failed:
                    return True
                scatter = partial(self._blocks.scatter, part.blocks)
                part.copy = self._copier.into(part.room.pages, scatter, load.after)
                self._copying[part] = part.copy
            return part.copy is not None and part.copy.done()
        except Exception:
            self._fail(load)
            return True

    def _fail(self, load: _Load) -> None:
        """Have a load end as failed, after the exception that is being handled: the tier's own."""
        transfer = load.transfer
        log.exception("the tier %r failed to move %d pages", transfer.tier, len(transfer.pages))
        load.failed.update(range(len(transfer.pages)))

    def _await_room(self) -> None:
        """If a part lacks a room, have the waiter wait for the first copy."""
        poor = any(not load.whole for load in self._order)
        if poor and self._copying and self._copier.anywhere and not self._waiting:
            self._waiting = True
            self._waiter.submit(self._wait, next(iter(self._copying.values())))

    def _wait(self, copy: Copy) -> None:
        with suppress(Exception):  # `_is_over` sees it, too
            copy.wait()
        with self._lock:
            self._waiting = False
        self._resume()
