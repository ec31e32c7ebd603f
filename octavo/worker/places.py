"""`Places`: which page each place of a store has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence


class Places:
    """A place that is being read is not given to another page before its last reader is done.

    Args:
        kept: page -> its place at the start.
        left: called with a place when its page leaves it, before it is reused.
    """

    def __init__(
        self, count: int, kept: Mapping[bytes, int] | None = None, left: Callable[[int], None] | None = None
    ) -> None:
        self._of: dict[bytes, int] = dict(kept or {})
        taken = set(self._of.values())
        self._free = [place for place in range(count)[::-1] if place not in taken]
        self._readers: dict[int, int] = {}
        self._dropped: set[int] = set()
        """Places whose pages are dropped, but which are being read."""
        self._left = left
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """Return up to as many free places."""
        with self._lock:
            return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give_back(self, places: Sequence[int]) -> None:
        """Return unused places from `take`."""
        with self._lock:
            self._free += places

    def put(self, pages: Sequence[bytes], places: Sequence[int]) -> None:
        """Make pages findable that were copied to places from `take`."""
        with self._lock:
            for page, place in zip(pages, places, strict=True):
                before = self._of.get(page)
                if before is not None:
                    self._release(before)
                self._of[page] = place

    def visit(self, page: bytes, visitor: Callable[[int], None]) -> None:
        """Call a function with the page's place, if it has one. The place does not change during the call."""
        with self._lock:
            if (place := self._of.get(page)) is not None:
                visitor(place)

    def read(self, pages: Sequence[bytes]) -> list[int | None]:
        """Return the pages' places, None for those that are not there; `done` with them later."""
        with self._lock:
            found = [self._of.get(page) for page in pages]
            for place in found:
                if place is not None:
                    self._readers[place] = self._readers.get(place, 0) + 1
            return found

    def done(self, places: Sequence[int | None]) -> None:
        with self._lock:
            for place in places:
                if place is None:
                    continue
                self._readers[place] -= 1
                if not self._readers[place]:
                    del self._readers[place]
                    if place in self._dropped:
                        self._dropped.remove(place)
                        self._free.append(place)

    def drop(self, pages: Sequence[bytes]) -> None:
        with self._lock:
            for page in pages:
                place = self._of.pop(page, None)
                if place is not None:
                    self._release(place)

    def _release(self, place: int) -> None:
        if self._left is not None:
            self._left(place)
        if place in self._readers:
            self._dropped.add(place)
        else:
            self._free.append(place)
