"""`Board`: request counts of all API processes of a server, visible to each of them."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from octavo.core.errors import ConfigError

_WORD = 8


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

    Args:
        row: this process's row.
        rows: number of processes.
        path: the shared file of several processes, created by the first.

    Raises:
        ConfigError: there is no room for the file.
    """

    def __init__(self, row: int = 0, rows: int = 1, path: Path | None = None) -> None:
        size = rows * len(Count) * _WORD
        self._row = row
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
        self._words[self._row * len(Count) + count] += number

    def own(self, count: Count) -> int:
        return self._words[self._row * len(Count) + count]

    def total(self, count: Count) -> int:
        """Return a count summed over all processes."""
        if self._rows == 1:
            return self._words[count]
        return sum(self._words[row * len(Count) + count] for row in range(self._rows))

    def clear(self, row: int) -> None:
        """Zero the row of a process that has ended."""
        for count in Count:
            self._words[row * len(Count) + count] = 0

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
