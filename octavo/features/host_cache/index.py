"""`PageIndex`: which pages the host has, and which go first when there are too many."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Link = tuple[bytes, bytes]
"""A page and its predecessor in the sequence; b"" for none."""

_SPARE_ENDS = 64
"""Outdated entries of the heap that are not worth removing."""


@dataclass(slots=True)
class _Entry:
    """
    Attributes:
        before: the page that this one continues; b"" for none.
        used: when it was used last, by a count of uses.
    """

    before: bytes
    used: int


class PageIndex:
    """Pages of sequences: a page is of use only with all those before it.

    So a page without followers goes first, of these the one that was used the longest time ago.

    Attributes:
        capacity: most pages; 0 until `resize`.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._entries: dict[bytes, _Entry] = {}
        self._followers: dict[bytes, set[bytes]] = {}
        """Page, which may be missing -> the pages in the index that continue it, if there are any."""
        self._ends: list[tuple[int, bytes]] = []
        """A heap of (use, page) with an entry for each page without followers, and outdated ones."""
        self._uses = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: bytes) -> bool:
        return page in self._entries

    def use(self, page: bytes) -> bool:
        """Note a use; return whether the page is there."""
        entry = self._entries.get(page)
        if entry is None:
            return False
        entry.used = next(self._uses)
        return True

    def resize(self, capacity: int) -> list[bytes]:
        """Set the capacity; return the pages that had to go."""
        self.capacity = capacity
        return self._shrink()

    def add(self, pages: Sequence[bytes], before: Sequence[bytes]) -> list[bytes]:
        """Add pages in the order of their sequences; return those that had to go.

        Args:
            before: for each the page that it continues; b"" for none.
        """
        for page, previous in zip(pages, before, strict=True):
            if self.use(page):
                continue
            self._entries[page] = _Entry(previous, next(self._uses))
            if previous:
                self._followers.setdefault(previous, set()).add(page)
            self._note_end(page)
        return self._shrink()

    def discard(self, pages: Iterable[bytes]) -> None:
        """Remove pages, if they are there."""
        for page in pages:
            if page in self._entries:
                self._remove(page)

    def clear(self) -> list[bytes]:
        """Remove all pages; return them."""
        gone = [*self._entries]
        self._entries.clear()
        self._followers.clear()
        self._ends.clear()
        return gone

    def _shrink(self) -> list[bytes]:
        gone = []
        while len(self._entries) > self.capacity:
            used, page = heapq.heappop(self._ends)
            entry = self._entries.get(page)
            if entry is None or page in self._followers:
                continue
            if entry.used != used:
                heapq.heappush(self._ends, (entry.used, page))
                continue
            gone.append(page)
            self._remove(page)
        return gone

    def _remove(self, page: bytes) -> None:
        before = self._entries.pop(page).before
        if not before:
            return
        beside = self._followers[before]
        beside.remove(page)
        if not beside:
            del self._followers[before]
            if before in self._entries:
                self._note_end(before)

    def _note_end(self, page: bytes) -> None:
        """Note that a page has no followers, if it has none."""
        if page in self._followers:
            return
        if len(self._ends) > 2 * len(self._entries) + _SPARE_ENDS:
            ends = (one for one in self._entries if one not in self._followers)
            self._ends = [(self._entries[one].used, one) for one in ends]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (self._entries[page].used, page))
