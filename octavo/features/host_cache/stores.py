"""`PageStore`: where pages are kept, by place; `Memory`, the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.features.host_cache.index import Link
from octavo.features.host_cache.places import Places


class PageStore(Protocol):
    """
    Attributes:
        count: places.
        page_bytes: of each.
        places: which page each has.
    """

    count: int
    page_bytes: int
    places: Places

    def store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        """Copy pages [N, page_bytes] uint8; return the indices of those that are not kept."""
        ...

    def load(self, places: Sequence[int | None], room: Callable[[], Tensor]) -> Collection[int]:
        """Copy pages to a room [N, page_bytes] uint8; return the indices of those that are not there.

        Args:
            places: from `Places.read`; it is done with them.
        """
        ...

    def link(self, links: Sequence[Link]) -> None:
        """Note what pages continue, so that `kept` returns them after a restart."""
        ...

    def kept(self) -> list[Link]:
        """Return what was there from the start, in the order in which it was linked."""
        ...

    def close(self) -> None:
        """Give up the store; nothing else is called."""
        ...


class Memory:
    """Places in the host's memory.

    Pages are copied by NumPy, in the calling thread: torch would take more threads, from those that compute.

    Raises:
        ConfigError: there is not as much memory.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        try:
            self._pages: NDArray[np.uint8] = np.empty((count, page_bytes), dtype=np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"--kv-offloading-size: {count * page_bytes / 2**30:.1f} GiB can't be allocated. Set a smaller size."
            ) from error
        self.count, self.page_bytes = count, page_bytes
        self.places = Places(count)

    def store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        places = self.places.take(len(names))
        for place, page in zip(places, pages.numpy(), strict=False):
            self._pages[place] = page
        self.places.put(names[: len(places)], places)
        return range(len(places), len(names))

    def load(self, places: Sequence[int | None], room: Callable[[], Tensor]) -> Collection[int]:
        try:
            pages = room().numpy()
            for i, place in enumerate(places):
                if place is not None:
                    pages[i] = self._pages[place]
        finally:
            self.places.done(places)
        return [i for i, place in enumerate(places) if place is None]

    def link(self, links: Sequence[Link]) -> None:
        """The memory does not outlast the process."""

    def kept(self) -> list[Link]:
        return []

    def close(self) -> None:
        self._pages = np.empty((0, 0), dtype=np.uint8)
