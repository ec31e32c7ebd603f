"""`Journal`: an append-only file of records that survives the end of its process at any moment.

A record is one line of JSON. It is handed to the system whole before `append` returns, so a killed process loses none;
what a power failure may lose is what came after the last `sync`. A last record that was cut short is cut off when the
journal is opened again, so the records are always a prefix of what was appended.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec


class Journal:
    """One file. Not for use by two threads at a time."""

    def __init__(self, path: Path, descriptor: int, end: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._end = end
        self._dirty = False

    @classmethod
    def open(cls, path: Path, take: Callable[[bytes, int], None]) -> Self:
        """Open the journal, made if need be, and hand each record and the place where it stands to `take`.

        The first record that `take` can't decode (`msgspec.DecodeError`) ends the journal: what follows is cut off.
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
                    except msgspec.DecodeError:
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
        return cls(path, descriptor, end)

    def append(self, record: bytes) -> int:
        """Add a record, one line without its newline; the place where it stands.

        Raises:
            OSError: it could not be written (the disk is full, say); the journal is as it was.
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
        """`size` bytes from `place` on."""
        return os.pread(self._descriptor, size, place)

    def sync(self) -> None:
        """Return once all records are on the disk."""
        if self._dirty:
            os.fsync(self._descriptor)
            self._dirty = False

    def close(self) -> None:
        os.close(self._descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file as a whole: after a crash it holds the old content or the new, never a part."""
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def try_to_write(folder: Path) -> None:
    """Raises OSError if a folder's disk takes no more."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))


def sync_folder(folder: Path) -> None:
    """Make names that were added to or removed from a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
