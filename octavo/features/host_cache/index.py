"""`PageIndex`: which pages the host has, and which go first when there are too many."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Entry:
    """
    Attributes:
        before: the page in the index that this one continues; b"" for none.
        used: when it was used last, by a count of uses.
        followers: pages in the index that continue this one.
    """

    before: bytes
    used: int
    followers: set[bytes] = field(default_factory=set)


class PageIndex:
    """Pages of sequences: a page is of use only with all those before it.

    So a page without followers goes first, of these the one that was used the longest time ago.

    Attributes:
        capacity: most pages; 0 until `resize`.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: list[tuple[int, bytes]] = []
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
            parent = self._entries.get(previous)
            self._entries[page] = entry = _Entry(b"" if parent is None else previous, next(self._uses))
            if parent is not None:
                parent.followers.add(page)
            heapq.heappush(self._leaves, (entry.used, page))
        return self._shrink()

    def discard(self, pages: Iterable[bytes]) -> None:
        """Remove pages, if they are there. Those that continue them stay, but continue nothing."""
        for page in pages:
            if page in self._entries:
                self._remove(page)

    def _shrink(self) -> list[bytes]:
        gone = []
        while len(self._entries) > self.capacity:
            used, page = heapq.heappop(self._leaves)
            entry = self._entries.get(page)
            if entry is None or entry.followers:
                continue
            if entry.used != used:
                heapq.heappush(self._leaves, (entry.used, page))
                continue
            gone.append(page)
            self._remove(page)
        return gone

    def _remove(self, page: bytes) -> None:
        entry = self._entries.pop(page)
        for follower in entry.followers:
            self._entries[follower].before = b""
        parent = self._entries.get(entry.before)
        if parent is not None:
            parent.followers.remove(page)
            if not parent.followers:
                heapq.heappush(self._leaves, (parent.used, entry.before))
