"""`PageStore`: stores pages by place; `Memory` is the one in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.features.host_cache.index import Link
from octavo.nn.pages import large
from octavo.worker.places import Places


class PageStore(Protocol):
    """
    Attributes:
        count: number of places.
        page_bytes: size of a page.
        places: which page each place has.
    """

    count: int
    page_bytes: int
    places: Places

    def store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        """Copy pages [N, page_bytes] uint8; return the indices of those that were not stored."""
        ...

    def load(self, places: Sequence[int | None], room: Callable[[], Tensor]) -> Collection[int]:
        """Copy pages to a room [N, page_bytes] uint8; return the indices of those that are missing.

        Args:
            places: from `Places.read`; released with `Places.done` at the end.
        """
        ...

    def link(self, links: Sequence[Link]) -> None:
        """Record the predecessors of pages; only linked pages are in `kept` after a restart."""
        ...

    def kept(self) -> list[Link]:
        """Return the pages found at the start, in the order in which they were linked."""
        ...

    def close(self) -> None:
        """Release the store. No other method may be called afterwards."""
        ...


class Memory:
    """Places in the host's memory.

    Pages are copied by NumPy, in the calling thread: torch would take more threads, from those that compute.

    Raises:
        ConfigError: there is not as much memory.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        try:
            memory: NDArray[np.uint8] = large(count * page_bytes).numpy()
        except OSError as error:
            raise ConfigError(
                f"--kv-offloading-size: {count * page_bytes / 2**30:.1f} GiB can't be allocated. Set a smaller size."
            ) from error
        self._pages = memory[: count * page_bytes].reshape(count, page_bytes)
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
        """Do nothing: the memory does not outlast the process."""

    def kept(self) -> list[Link]:
        return []

    def close(self) -> None:
        self._pages = np.empty((0, 0), dtype=np.uint8)
