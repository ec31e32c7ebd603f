"""`Files`: pages in files, which outlast the process.

A rank has two files: `.pages` has a page for each place, `.names` a header and a record for each place. The record is
written after the page, and cleared before the place is reused. So names and pages match even if the process is killed.
After a power failure they may not; then the checksum differs when the page is loaded.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

import octavo
from octavo.core.errors import ConfigError
from octavo.features.host_cache.index import Link
from octavo.worker.places import Places

log = logging.getLogger(__name__)

_FORMAT = 1
"""Changes with the way in which files are written."""
_HEADER_BYTES = 256
_NAME_BYTES = 62
_RECORD = struct.Struct(f"<BB{_NAME_BYTES}s{_NAME_BYTES}sIQ")
"""Lengths of the page's name (0: the place is empty) and of its predecessor's name; both names; CRC-32 of the page;
time of `link` in nanoseconds."""
_MOST_ENGINES = 64
_STAT_BYTES = 512
"""Unit of `st_blocks`."""


class Files:
    """
    Args:
        folder: created if missing. Each engine that uses it has its own files.
        rank, ranks: of this process.

    Raises:
        ConfigError: the folder can't be used, or its disk is too full.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, count: int, page_bytes: int) -> None:
        self.count, self.page_bytes = count, page_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._names, self._pages = _opened(folder, f"rank{rank}of{ranks}")
            self._check_room(folder)
            self._prepare()
        except OSError as error:
            raise ConfigError(f"--kv-offloading-path {folder}: {error.strerror}. Name a writable folder.") from error
        self._warned = False
        self._sums = [0] * count
        self._kept = self._read_records()
        self.places = Places(count, {page: place for place, (page, _) in self._kept.items()}, self._clear)

    def store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        places = self.places.take(len(names))
        written = 0
        try:
            for place, page in zip(places, pages.numpy(), strict=False):
                self._sums[place] = zlib.crc32(page)
                _write(self._pages, memoryview(page), place * self.page_bytes)
                written += 1
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.warning("failed to write KV blocks to files: %s", error.strerror)
            self._warned = True
            self.places.give_back(places[written:])
        self.places.put(names[:written], places[:written])
        return range(written, len(names))

    def load(self, places: Sequence[int | None], room: Callable[[], Tensor]) -> Collection[int]:
        try:
            pages = room().numpy()
            return [i for i, place in enumerate(places) if place is None or not self._read(place, memoryview(pages[i]))]
        finally:
            self.places.done(places)

    def _read(self, place: int, into: memoryview) -> bool:
        """Read a page; return whether its checksum matches."""
        try:
            whole = os.preadv(self._pages, [into], place * self.page_bytes) == self.page_bytes
        except OSError as error:
            log.warning("failed to read a KV block from its file: %s", error.strerror)
            return False
        return whole and zlib.crc32(into) == self._sums[place]

    def link(self, links: Sequence[Link]) -> None:
        for page, before in links:
            assert len(page) <= _NAME_BYTES
            self.places.visit(page, partial(self._note, page=page, before=before))

    def kept(self) -> list[Link]:
        return [*self._kept.values()]

    def close(self) -> None:
        """Close and unlock the files."""
        os.close(self._names)
        os.close(self._pages)

    def _check_room(self, folder: Path) -> None:
        """Raise ConfigError if the disk has less free space than the files may take."""
        free = shutil.disk_usage(folder).free + os.fstat(self._pages).st_blocks * _STAT_BYTES
        if self.count * self.page_bytes > free:
            self.close()
            raise ConfigError(
                f"--kv-offloading-path {folder}: {self.count * self.page_bytes / 2**30:.1f} GiB are needed, but its "
                f"disk has {free / 2**30:.1f} GiB free. Set a smaller --kv-offloading-size."
            )

    def _prepare(self) -> None:
        """Resize the files; empty them first if they are from another form of pages or another version."""
        form = {"format": _FORMAT, "octavo": octavo.__version__, "page_bytes": self.page_bytes}
        header = json.dumps(form).encode().ljust(_HEADER_BYTES)
        found = os.pread(self._names, _HEADER_BYTES, 0)
        if found != header:
            if found:
                log.info("the KV cache files are from another model or version; their contents are dropped")
            os.ftruncate(self._names, 0)
            os.ftruncate(self._pages, 0)
            _write(self._names, memoryview(header), 0)
        os.ftruncate(self._names, _HEADER_BYTES + self.count * _RECORD.size)
        os.ftruncate(self._pages, self.count * self.page_bytes)

    def _read_records(self) -> dict[int, Link]:
        """Return the page of each place and its predecessor, in the order in which they were linked."""
        data = os.pread(self._names, self.count * _RECORD.size, _HEADER_BYTES)
        found: list[tuple[int, int, Link]] = []
        for place, (length, before_length, name, before, checksum, at) in enumerate(_RECORD.iter_unpack(data)):
            if length:
                self._sums[place] = checksum
                found.append((at, place, (name[:length], before[:before_length])))
        return {place: link for _, place, link in sorted(found)}

    def _note(self, place: int, page: bytes, before: bytes) -> None:
        record = _RECORD.pack(len(page), len(before), page, before, self._sums[place], time.time_ns())
        self._write_record(place, record)

    def _clear(self, place: int) -> None:
        self._write_record(place, bytes(1))

    def _write_record(self, place: int, data: bytes) -> None:
        try:
            _write(self._names, memoryview(data), _HEADER_BYTES + place * _RECORD.size)
        except OSError as error:
            log.warning("failed to write the name of a KV block: %s", error.strerror)


def _opened(folder: Path, name: str) -> tuple[int, int]:
    """Open the first pair of files that no other engine uses."""
    for number in itertools.count():
        if number == _MOST_ENGINES:
            raise ConfigError(f"--kv-offloading-path {folder}: {number} engines use it. Name another folder.")
        names = os.open(folder / f"{name}-{number}.names", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(names, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(names)
            continue
        return names, os.open(folder / f"{name}-{number}.pages", os.O_RDWR | os.O_CREAT, 0o600)
    raise AssertionError("unreachable")


def _write(file: int, data: memoryview, at: int) -> None:
    """Write all of it."""
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count
