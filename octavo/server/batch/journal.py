"""`Journal`: an append-only file of records that survives a crash at any moment.

A record is one line of JSON. It is written to the operating system before `append` returns, so a killed process loses
none; a power failure may lose records after the last `sync`. An incomplete last record is truncated when the journal is
opened again, so the records are always a prefix of those appended.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec


class Journal:
    """One file. Not thread-safe."""

    def __init__(self, descriptor: int, end: int) -> None:
        self._descriptor = descriptor
        self._end = end
        self._dirty = False

    @classmethod
    def open(cls, path: Path, take: Callable[[bytes, int], None]) -> Self:
        """Open or create the journal, and pass each record and its offset to `take`.

        The first record that `take` can't decode (`msgspec.DecodeError`, `UnicodeDecodeError`) ends the journal: the
        rest is truncated.
        """
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = 0
            with open(descriptor, "rb", closefd=False) as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    try:
                        take(line, end)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        break
                    end += len(line)
            os.ftruncate(descriptor, end)
            if new:
                sync_folder(path.parent)
        except BaseException:
            os.close(descriptor)
            if new:
                path.unlink()
            raise
        return cls(descriptor, end)

    def append(self, record: bytes) -> int:
        """Append a record, one line without its newline. Return its offset in bytes.

        Raises:
            OSError: it could not be written (such as for a full disk); the journal is unchanged.
        """
        start, data = self._end, record + b"\n"
        self._dirty = True
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], start + done)
        except OSError:
            os.ftruncate(self._descriptor, start)
            raise
        self._end += len(data)
        return start

    def read(self, place: int, size: int) -> bytes:
        """Return `size` bytes from offset `place`."""
        return os.pread(self._descriptor, size, place)

    def sync(self) -> None:
        """Return once all records are on disk."""
        if self._dirty:
            os.fsync(self._descriptor)
            self._dirty = False

    def close(self) -> None:
        os.close(self._descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file atomically: after a crash it has the old content or the new one."""
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def try_to_write(folder: Path) -> None:
    """Raise OSError if a folder's disk can't be written to."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))


def sync_folder(folder: Path) -> None:
    """Make added and removed names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
