"""`PageBuffer`: pages in the host's memory that wait for other servers to fetch them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.nn.pages import large, populate
from octavo.worker.places import Places


class PageBuffer:
    """Memory of one rank.

    Attributes:
        count: most pages.
        page_bytes: bytes of each.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        self.count, self.page_bytes = count, page_bytes
        self._memory = large(count * page_bytes)
        pages: NDArray[np.uint8] = self._memory.numpy()
        self._pages = pages[: count * page_bytes].reshape(count, page_bytes)
        self._places = Places(count)
        self._expected: set[bytes] = set()
        self._changed = threading.Condition()

    def populate(self) -> None:
        """Have the system give the memory before pages fill it; see `nn.pages.populate`."""
        populate(self._memory)

    def expect(self, pages: Sequence[bytes]) -> None:
        """These pages will be stored, or dropped."""
        with self._changed:
            self._expected.update(pages)

    def store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        """Copy pages [n, page bytes] uint8; return the indices of those that lack room."""
        places = self._places.take(len(names))
        for place, page in zip(places, pages.numpy(), strict=False):
            self._pages[place] = page
        self._places.put(names[: len(places)], places)
        self._settle(names)
        return range(len(places), len(names))

    def drop(self, pages: Sequence[bytes]) -> None:
        """Give up pages, expected ones too."""
        self._places.drop(pages)
        self._settle(pages)

    def _settle(self, pages: Sequence[bytes]) -> None:
        with self._changed:
            self._expected.difference_update(pages)
            self._changed.notify_all()

    def has(self, page: bytes) -> bool:
        found: list[int] = []
        self._places.visit(page, found.append)
        return bool(found)

    @contextmanager
    def read(self, names: Sequence[bytes], wait_s: float = 0.0) -> Iterator[list[NDArray[np.uint8] | None]]:
        """Wait up to `wait_s` for pages that are expected; yield each page [page bytes], None for those that are not
        there. They stay as they are during the `with`."""
        until = time.monotonic() + wait_s
        with self._changed:
            while not self._expected.isdisjoint(names) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        places = self._places.read(names)
        try:
            yield [None if place is None else self._pages[place] for place in places]
        finally:
            self._places.done(places)
