"""`HostPages`: the worker half. It has pages of the KV cache in the host's memory, or in files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.device.cgroup import memory
from octavo.features import FeatureContext
from octavo.features.host_cache.files import Files
from octavo.features.host_cache.settings import HostCacheSettings
from octavo.features.host_cache.stores import Memory, PageStore
from octavo.models.model import EncoderModel, Model
from octavo.worker.hooks import Site, WorkerHook

log = logging.getLogger(__name__)

_LEAST = 8
"""Fewest places per rank; some are kept free for pages that arrive."""
_THREADS = 4
_ROOM_BYTES, _ROOMS = 16 << 20, 4
"""Of what a load fills at a time, for the copy to the device."""


class HostPages(WorkerHook):
    """The pages of one rank. Their memory is not pinned: it is taken from the system when pages first fill it."""

    name = "host_cache"

    def __init__(self, num_bytes: int, folder: Path | None = None) -> None:
        """
        Args:
            num_bytes: of all ranks together.
            folder: where files have the pages; None for the host's memory.
        """
        self._num_bytes = num_bytes
        self._folder = folder
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="octavo-host-cache")
        self._pages: PageStore = Memory(0, 0)
        self._storing: set[Future[Collection[int]]] = set()

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        page_bytes = site.blocks.page_bytes
        if self._pages.page_bytes == page_bytes:
            return  # after a sleep
        own = self._num_bytes // site.ranks
        count = own // page_bytes
        if count < _LEAST:
            raise ConfigError(
                f"--kv-offloading-size leaves {own} bytes to each rank, but a KV block has {page_bytes}. Set at least "
                f"{_LEAST * page_bytes * site.ranks / 2**30:.2g} GiB."
            )
        if self._folder is not None:
            self._pages = Files(self._folder, site.rank, site.ranks, count, page_bytes)
            log.info(
                "keep up to %d KV blocks (%.2f GiB) in %s; found %d",
                count,
                count * page_bytes / 2**30,
                self._folder,
                len(self._pages.kept()),
            )
            return
        self._check_memory(own, site)
        self._pages = Memory(count, page_bytes)
        log.info("reserved %.2f GiB of the host's memory for %d KV blocks", count * page_bytes / 2**30, count)

    @staticmethod
    def _check_memory(own: int, site: Site) -> None:
        """Raise ConfigError if the machine has too little memory for all of its ranks."""
        there = memory()
        if own * site.neighbours > there:
            raise ConfigError(
                f"--kv-offloading-size: {own * site.neighbours / 2**30:.1f} GiB are for this machine, which has "
                f"{there / 2**30:.1f} GiB of memory. Set a smaller size."
            )

    def detach(self) -> None:
        """Wait for stores, whose end may never be reported: the engine half has what they kept dropped later. Close
        files."""
        wait(self._storing)
        if self._folder is not None:
            self._pages.close()
            self._pages = Memory(0, 0)

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Return the number of places, or the pages found at the start; record links; or drop pages."""
        match method:
            case "places":
                return self._pages.count
            case "kept":
                return self._pages.kept()
            case "link":
                return self._pages.link(args["links"])
            case "drop":
                return self._pages.places.drop(args["pages"])
            case _:
                return super().call(method, args)

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        return max(1, _ROOM_BYTES // page_bytes), _ROOMS

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        storing = self._threads.submit(self._pages.store, names, pages)
        self._storing = {one for one in self._storing if not one.done()} | {storing}
        return storing

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        pages = self._pages
        return self._threads.submit(pages.load, pages.places.read(names), room)


def build_worker(context: FeatureContext) -> HostPages | None:
    settings = context.settings_of(HostCacheSettings)
    return HostPages(settings.num_bytes, settings.folder) if settings.kv_offloading_size else None
