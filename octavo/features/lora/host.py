"""`Host`: adapters in the host's memory, or in their files until they are there.

Touching new memory can take longer than reading a file from the page cache, above all in a virtual machine. So the
first load onto a device reads pages from the file straight into rooms, whose memory is in use already, and the copy for
later loads is made afterwards, when nothing is loaded: it takes more of the memory's bandwidth than a load.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.features.lora.layout import Layout
from octavo.features.lora.payload import Reading
from octavo.features.lora.reader import HELPERS, OpenAdapter, Reader

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Adapters that are read at once, and that are loaded at once."""
_FILLERS = 6
"""Threads that fill rooms: as many as rank 16 of an 8B model has parts, so that all of them are read at once."""


class HostCopy:
    """One adapter of a rank. Everything that `fill` returns is of the version of the files that was opened.

    Args:
        adapter: its open files.
        pages: [blocks, block bytes] uint8; None if `make` reads them later. Until then, `fill` reads the file.
    """

    def __init__(self, adapter: OpenAdapter, pages: Tensor | None) -> None:
        self.layout: Layout = adapter.layout
        self._adapter = None if pages is not None else adapter
        self._pages = pages

    @property
    def made(self) -> bool:
        return self._pages is not None

    def make(self) -> None:
        """Read all pages into memory, unless they are there, or the copy was dropped."""
        adapter = self._adapter
        if adapter is None:
            return
        try:
            pages = adapter.read(None)
        except Exception as error:  # nobody waits for the copy: the next load reads the files again, or fails
            log.warning("no copy is kept in the host's memory: %s", error)
            return
        if self._adapter is not None:
            self._pages, self._adapter = pages, None

    def drop(self) -> None:
        """Free the pages. A load that reads them goes on."""
        self._pages = self._adapter = None

    def fill(self, first: int, into: Tensor) -> bool:
        """Copy the pages from number `first` on into [n, block bytes] uint8; return whether that succeeded.

        Pages past the adapter's last are left as they are: other stages of a pipeline may have more of it.
        """
        count = min(len(into), self.layout.num_blocks - first)
        if count <= 0:
            return True
        adapter, pages = self._adapter, self._pages  # in this order: `make` sets them in the other
        if pages is not None:
            # Not by torch, which would divide it over threads, beside a model that computes.
            np.copyto(into[:count].numpy(), pages[first : first + count].numpy())
            return True
        if adapter is None:
            return False
        try:
            adapter.fill(first, into[:count])
        except ModelFileError as error:
            log.warning("an adapter can't be loaded: %s", error)
            return False
        return True


class Host:
    """All adapters of a rank, and the threads that read and load them.

    Attributes:
        helpers: threads that read parts of adapters into memory.
        copies: uid -> the copy.
    """

    def __init__(self) -> None:
        self._openers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="octavo-adapter-files")
        self._readers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="octavo-adapters")
        """Not those that open files: what is in the page cache does not wait for what a disk reads."""
        self.helpers = ThreadPoolExecutor(HELPERS, thread_name_prefix="octavo-adapter-parts")
        self.copies: dict[int, HostCopy] = {}
        self._loaders = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="octavo-adapter-loads")
        """Not those that read: each of a load's parts would wait for them."""
        self._fillers = ThreadPoolExecutor(_FILLERS, thread_name_prefix="octavo-adapter-rooms")
        self._copiers = ThreadPoolExecutor(1, thread_name_prefix="octavo-adapter-copies")
        self._filling = 0
        """Parts of loads under way."""
        self._unmade: deque[HostCopy] = deque()
        """Copies to be made; the first one is next, or is being made."""
        self._filled = threading.Condition()
        """Of both."""

    def read(self, reader: Reader, reading: Reading) -> Future[OpenAdapter]:
        """Have `load` find an adapter: read it into memory, unless its first load may read the file.

        It fails with ModelFileError if a file can't be read or used, or has changed meanwhile.
        """
        found: Future[OpenAdapter] = Future()
        self._openers.submit(_end, found, partial(self._open, reader, reading, found))
        return found

    def _open(self, reader: Reader, reading: Reading, found: Future[OpenAdapter]) -> None:
        adapter = reader.open(reading)
        if adapter.in_memory:
            self._keep(reading.uid, adapter, None, found)
        else:
            self._readers.submit(_end, found, partial(self._read, reader, reading, adapter, found))

    def _read(self, reader: Reader, reading: Reading, adapter: OpenAdapter, found: Future[OpenAdapter]) -> None:
        self._keep(reading.uid, adapter, adapter.read(reader.helpers), found)

    def _keep(self, uid: int, adapter: OpenAdapter, pages: Tensor | None, found: Future[OpenAdapter]) -> None:
        self.copies[uid] = HostCopy(adapter, pages)
        found.set_result(adapter)

    def drop(self, uid: int) -> None:
        """Forget an adapter, if it is there."""
        copy = self.copies.pop(uid, None)
        if copy is not None:
            copy.drop()

    def load(
        self, uid: int, numbers: Sequence[int], room: Callable[[], Tensor], *, in_parts: bool
    ) -> Future[Collection[int]]:
        """Fill a room with consecutive pages, see `WorkerHook.load`.

        Args:
            in_parts: an adapter has several rooms; otherwise a CPU computes, whose cores are not all for loads.
        """
        threads = self._fillers if in_parts else self._loaders
        self._filling_changes(1)
        try:
            return threads.submit(self._fill, uid, numbers, room)
        except BaseException:
            self._filling_changes(-1)
            raise

    def _fill(self, uid: int, numbers: Sequence[int], room: Callable[[], Tensor]) -> Collection[int]:
        try:
            copy = self.copies.get(uid)
            if copy is None or not copy.fill(numbers[0], room()):
                return range(len(numbers))
            if not copy.made and numbers[-1] + 1 >= copy.layout.num_blocks:
                self._make_later(copy)
            return ()
        finally:
            self._filling_changes(-1)

    def _filling_changes(self, by: int) -> None:
        with self._filled:
            self._filling += by
            if not self._filling:
                self._filled.notify()

    def _make_later(self, copy: HostCopy) -> None:
        with self._filled:
            if copy not in self._unmade:
                self._unmade.append(copy)
                if len(self._unmade) == 1:
                    self._copiers.submit(self._make)

    def _make(self) -> None:
        """Make the first copy once nothing is loaded, then the others: each by a task that the one before begins, which
        fails when the program ends. Tasks that had begun would all be waited for there."""
        with self._filled:
            self._filled.wait_for(lambda: not self._filling)
        self._unmade[0].make()
        with self._filled:
            self._unmade.popleft()
            if self._unmade:
                self._copiers.submit(self._make)


def _end(future: Future[OpenAdapter], work: Callable[[], None]) -> None:
    """Do what ends a future, now or later; an error ends it, too."""
    try:
        work()
    except Exception as error:
        future.set_exception(error)
