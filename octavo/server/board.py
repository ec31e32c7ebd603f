"""`Board`: request counts of all API processes of a server, visible to each of them."""

from __future__ import annotations

import fcntl
import heapq
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

from octavo.core.errors import ConfigError

_WORD = 8
_PLACES = 1024
"""Tenants with requests in one process; further ones are counted together."""
_FURTHER = 1
"""The name's digest under which they are."""


class Count(IntEnum):
    """A column."""

    CHOICES = 0
    """Choices of clients' requests, running or waiting."""
    BACKGROUND = 1
    """Choices of background work."""
    QUEUED = 2
    """Requests whose first token has not arrived."""
    QUEUED_TOKENS = 3
    """Prompt tokens of those."""
    SERVED = 4
    """HTTP requests in flight."""


class Board:
    """One row of counts per process; each process writes its own row. A single process uses private memory.

    After the counts, a row has the number of places in use for tenants, and for each place a name's digest and a count.

    Args:
        row: this process's row.
        rows: number of processes.
        path: the shared file of several processes, created by the first.

    Raises:
        ConfigError: there is no room for the file.
    """

    def __init__(self, row: int = 0, rows: int = 1, path: Path | None = None) -> None:
        self._width = len(Count) + 1 + 2 * _PLACES
        size = rows * self._width * _WORD
        self._row = row
        self._places: dict[int, int] = {}
        """Digest of a tenant's name -> its place in this process's row."""
        self._left: list[int] = []
        """Places that were used before, the lowest first."""
        self._rows = rows
        self._file: int | None = None
        if path is None:
            self._words = memoryview(bytearray(size)).cast("q")
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._file)
        try:
            os.posix_fallocate(self._file, 0, size)  # a write to a page that has no room would end the process
        except OSError as exc:
            raise ConfigError(
                f"{path} can't be allocated ({exc.strerror}). Free space there, or set TMPDIR to another folder."
            ) from exc
        self._words = memoryview(mmap.mmap(self._file, size)).cast("q")

    def add(self, count: Count, number: int) -> None:
        """Add to a count of this process."""
        self._words[self._row * self._width + count] += number

    def own(self, count: Count) -> int:
        return self._words[self._row * self._width + count]

    def total(self, count: Count) -> int:
        """Return a count summed over all processes."""
        if self._rows == 1:
            return self._words[count]
        return sum(self._words[row * self._width + count] for row in range(self._rows))

    def add_tenant(self, tenant: str, number: int) -> None:
        """Add to the requests of a tenant in this process; call it within `alone` to add to 0."""
        words, start = self._words, self._row * self._width + len(Count)
        digest = self._digest(tenant)
        place = self._places.get(digest)
        if place is None:
            place = heapq.heappop(self._left) if self._left else words[start]
            words[start + 1 + 2 * place] = digest
            words[start] = max(words[start], place + 1)
            self._places[digest] = place
        at = start + 2 + 2 * place
        words[at] += number
        if not words[at]:
            del self._places[digest]
            heapq.heappush(self._left, place)

    def of_tenant(self, tenant: str) -> int:
        """Return the requests of a tenant, summed over all processes."""
        digest, total = self._digest(tenant), 0
        for start in range(len(Count), self._rows * self._width, self._width):
            used = self._words[start]
            digests = self._words[start + 1 : start + 1 + 2 * used : 2].tolist()
            if digest in digests:
                total += self._words[start + 2 + 2 * digests.index(digest)]
        return total

    def _digest(self, tenant: str) -> int:
        found = int.from_bytes(blake2b(tenant.encode(), digest_size=7).digest()) + _FURTHER + 1
        full = len(self._places) >= _PLACES - 1
        return _FURTHER if full and found not in self._places else found

    def clear(self, row: int) -> None:
        """Zero the row of a process that has ended."""
        for word in range(row * self._width, (row + 1) * self._width):
            self._words[word] = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other processes' check-then-add for the time of the block, which must not wait."""
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
