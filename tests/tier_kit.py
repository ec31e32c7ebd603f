"""A tier of the toy device in a dictionary, with transfers that take their time, fail, and come in any order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.cache.tier import BlockNames, Tier, page_name
from octavo.core.cache_groups import CacheGroup
from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.engine.toy import Cell
from octavo.schedule.hooks import EngineHook

BLOCK = 4
REALM = "/files"
"""That of an engine without a model's files."""


class ShelfTier(Tier):
    """The engine half: what it was told is in the dictionary."""

    def __init__(self, name: str, deadline_s: float = 1e9) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self.index: set[bytes] = set()

    def holds(self, page: bytes) -> bool:
        return page in self.index

    def stored(self, pages: Sequence[bytes], before: Sequence[bytes]) -> None:
        assert not self.index & set(pages), "stored twice"
        assert len(before) == len(pages)
        self.index |= set(pages)

    def not_stored(self, pages: Sequence[bytes]) -> None:
        assert not self.index & set(pages), "stored after all"

    def lost(self, pages: Sequence[bytes]) -> None:
        self.index -= set(pages)


class ChoosyTier(ShelfTier):
    """Stores what requests with its option compute, and what they share."""

    def __init__(self, name: str, deadline_s: float = 1e9) -> None:
        super().__init__(name, deadline_s)
        self.coming: set[bytes] = set()

    def wants(self, options: Mapping[str, msgspec.Raw]) -> bool:
        return self.name in options

    def wants_shared(self, options: Mapping[str, msgspec.Raw]) -> bool:
        return self.name in options

    def storing(self, pages: Sequence[bytes]) -> None:
        assert not self.index & set(pages), "stored twice"
        self.coming |= set(pages)

    def stored(self, pages: Sequence[bytes], before: Sequence[bytes]) -> None:
        assert self.coming >= set(pages), "not announced"
        super().stored(pages, before)


class Shelf(EngineHook):
    opt_in = True

    def __init__(self, name: str = "shelf", deadline_s: float = 1e9) -> None:
        self.name = name
        self.tier = ShelfTier(name, deadline_s)


class ChoosyShelf(Shelf):
    def __init__(self, name: str = "shelf", deadline_s: float = 1e9) -> None:
        super().__init__(name, deadline_s)
        self.tier = ChoosyTier(name, deadline_s)


@dataclass
class Work:
    transfer: Transfer
    cells: list[list[Cell | None]]
    loads: bool
    pages: list[list[Cell | None]] | None = None
    """What a store has read."""


@dataclass
class ShelfMover:
    """The worker half. Everything takes a random number of steps; a part of the loads and stores fails.

    It knows by the cells' own contents what every page must hold.
    """

    rng: random.Random
    groups: Sequence[CacheGroup]
    latency: float = 0.5
    """Probability that a transfer goes on at a look at it."""
    failures: float = 0.0
    pages: dict[tuple[str, bytes], list[Cell | None]] = field(default_factory=dict)
    work: dict[int, Work] = field(default_factory=dict)
    news: list[Moved] = field(default_factory=list)
    loaded: set[bytes] = field(default_factory=set)
    begun: list[Transfer] = field(default_factory=list)
    """Loads."""

    def begin(self, transfers: Transfers, cells: list[list[Cell | None]]) -> None:
        for ticket in transfers.doubted:
            if ticket not in self.work:
                self.news.append(Moved(ticket, TransferState.UNKNOWN))
        for transfer in transfers.stores:
            self.work[transfer.ticket] = Work(transfer, cells, loads=False)
        for transfer in transfers.loads:
            self.begun.append(transfer)
            self.work[transfer.ticket] = Work(transfer, cells, loads=True)

    def take(self) -> list[Moved]:
        for ticket, work in list(self.work.items()):
            if self.rng.random() < self.latency:
                self._advance(ticket, work)
        news, self.news = self.news, []
        return news

    def _advance(self, ticket: int, work: Work) -> None:
        if work.loads:
            self._end(ticket, self._fill(work))
        elif work.pages is None:
            work.pages = [list(work.cells[block]) for block in work.transfer.blocks]
            for name, page in zip(work.transfer.pages, work.pages, strict=True):
                self.check(name, page)
            self.news.append(Moved(ticket, TransferState.READ))
        else:
            failed = self._fails(work.transfer)
            for i, (name, page) in enumerate(zip(work.transfer.pages, work.pages, strict=True)):
                if i not in failed:
                    self.pages[work.transfer.tier, name] = page
            self._end(ticket, failed)

    def _fill(self, work: Work) -> list[int]:
        """Blocks are overwritten even if the load fails."""
        failed = self._fails(work.transfer)
        for i, (name, block) in enumerate(zip(work.transfer.pages, work.transfer.blocks, strict=True)):
            if i in failed:
                work.cells[block] = [(-1,)] * BLOCK
            else:
                work.cells[block] = list(self.pages[work.transfer.tier, name])
        if not failed:
            self.loaded |= set(work.transfer.pages)
        return failed

    def _fails(self, transfer: Transfer) -> list[int]:
        return [i for i in range(len(transfer.pages)) if self.rng.random() < self.failures]

    def _end(self, ticket: int, failed: list[int]) -> None:
        del self.work[ticket]
        self.news.append(Moved(ticket, TransferState.ENDED, failed))

    def check(self, name: bytes, page: list[Cell | None]) -> None:
        """What is stored under a name is what the name says: its digest is of the context that the cells stand for."""
        group = int.from_bytes(name[-2:], "big")
        context = page[-1] if self.groups[group].grows else page[0]
        assert context is not None, "an empty block is stored"
        assert name == name_of(context, group), f"page of {context} under another name"
        if self.groups[group].grows:
            first = len(context) - BLOCK
            assert page == [context[: first + i + 1] for i in range(BLOCK)], "a block was stored in part"


def name_of(context: Sequence[int], group: int) -> bytes:
    count, rest = divmod(len(context), BLOCK)
    assert not rest, "the context ends within a block"
    return page_name(BlockNames(REALM, "", BLOCK).upto(list(context), count)[count - 1], group)
