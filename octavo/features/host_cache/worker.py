"""`HostPages`: the worker half. It has pages of the KV cache in the host's memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.device.cgroup import memory_left
from octavo.features import FeatureContext
from octavo.features.host_cache.settings import HostCacheSettings
from octavo.models.model import EncoderModel, Model
from octavo.worker.hooks import Site, WorkerHook

log = logging.getLogger(__name__)

_LEAST = 8
"""Fewest places per rank; some are kept free for pages that arrive."""
_THREADS = 4
_ROOM_BYTES, _ROOMS = 16 << 20, 4
"""Of what a load fills at a time, for the copy to the device."""


class _Places:
    """Places in memory, and which page each has.

    A place that is being read is not given to another page before its last reader is done.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self._of: dict[bytes, int] = {}
        self._readers: dict[int, int] = {}
        self._dropped: set[int] = set()
        """Places whose pages are dropped, but which are being read."""
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """Return up to as many free places."""
        with self._lock:
            return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def put(self, pages: Sequence[bytes], places: Sequence[int]) -> None:
        """Make pages findable that were copied to places from `take`."""
        with self._lock:
            for page, place in zip(pages, places, strict=True):
                before = self._of.get(page)
                if before is not None:
                    self._release(before)
                self._of[page] = place

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
        if place in self._readers:
            self._dropped.add(place)
        else:
            self._free.append(place)


class _Host:
    """Places in the host's memory for pages, with their contents.

    Pages are copied by NumPy, in the calling thread: torch would take more threads, from those that compute.

    Raises:
        ConfigError: there is not as much memory.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        try:
            self.memory: NDArray[np.uint8] = np.empty((count, page_bytes), dtype=np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"--kv-offloading-size: {count * page_bytes / 2**30:.1f} GiB can't be allocated. Set a smaller size."
            ) from error
        self.places = _Places(count)

    def store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        places = self.places.take(len(names))
        for place, page in zip(places, pages.numpy(), strict=False):
            self.memory[place] = page
        self.places.put(names[: len(places)], places)
        return range(len(places), len(names))

    def load(self, places: Sequence[int | None], room: Callable[[], Tensor]) -> Collection[int]:
        try:
            pages = room().numpy()
            for i, place in enumerate(places):
                if place is not None:
                    pages[i] = self.memory[place]
        finally:
            self.places.done(places)
        return [i for i, place in enumerate(places) if place is None]


class HostPages(WorkerHook):
    """The pages of one rank. Their memory is not pinned: it is taken from the system when pages first fill it."""

    name = "host_cache"

    def __init__(self, num_bytes: int) -> None:
        """
        Args:
            num_bytes: of all ranks together.
        """
        self._num_bytes = num_bytes
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="octavo-host-cache")
        self._host = _Host(0, 0)
        self._storing: set[Future[Collection[int]]] = set()

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        page_bytes = site.blocks.page_bytes
        if self._host.memory.shape[1] == page_bytes:
            return  # after a sleep
        own = self._num_bytes // site.ranks
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if (left := memory_left()) is not None:
            there = min(there, left)
        if own * site.neighbours > there:
            raise ConfigError(
                f"--kv-offloading-size: {own * site.neighbours / 2**30:.1f} GiB are for this machine, which has "
                f"{there / 2**30:.1f} GiB of memory. Set a smaller size."
            )
        count = own // page_bytes
        if count < _LEAST:
            raise ConfigError(
                f"--kv-offloading-size leaves {own} bytes to each rank, but a KV block has {page_bytes}. Set at least "
                f"{_LEAST * page_bytes * site.ranks / 2**30:.2g} GiB."
            )
        self._host = _Host(count, page_bytes)
        log.info("reserved %.2f GiB of the host's memory for %d KV blocks", count * page_bytes / 2**30, count)

    def detach(self) -> None:
        """Wait for stores, whose end may never be reported: the engine half has what they kept dropped later."""
        wait(self._storing)

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Return for how many pages there are places; or drop pages."""
        match method:
            case "places":
                return len(self._host.memory)
            case "drop":
                return self._host.places.drop(args["pages"])
            case _:
                return super().call(method, args)

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        return max(1, _ROOM_BYTES // page_bytes), _ROOMS

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        storing = self._threads.submit(self._host.store, names, pages)
        self._storing = {one for one in self._storing if not one.done()} | {storing}
        return storing

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        host = self._host
        return self._threads.submit(host.load, host.places.read(names), room)


def build_worker(context: FeatureContext) -> HostPages | None:
    settings = context.settings_of(HostCacheSettings)
    return HostPages(settings.num_bytes) if settings.kv_offloading_size else None
