"""A ring of shared memory in which one process sends bytes to several others: written once, read by each.

The memory has no name, so none is left in /dev/shm however the processes end. Counters of the kernel (eventfd(2)) say
how many bytes were written and read; they also order the accesses and wake the readers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
from collections.abc import Callable, Iterator
from typing import NamedTuple

DEFAULT_SIZE = 1 << 20
_LOOK_MS = 100


class RingHandles(NamedTuple):
    """File descriptors of one reader: the memory, bytes written, bytes read."""

    memory: int
    written: int
    read: int


class RingWriter:
    """The writing end. `write` is not safe for several threads at once."""

    def __init__(self, readers: int, size: int = DEFAULT_SIZE) -> None:
        self._descriptor = os.memfd_create("octavo-plans", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)
        self._written = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(readers)]
        self._read = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(readers)]
        self._room = [size] * readers
        self._size, self._at = size, 0
        self._closed = False

    def handles(self, reader: int) -> RingHandles:
        """Return the descriptors for a reader's process."""
        return RingHandles(self._descriptor, self._written[reader], self._read[reader])

    def write(self, data: bytes, check: Callable[[], None]) -> None:
        """Write the bytes, in pieces if they exceed the ring.

        Args:
            check: called while a reader leaves no room; raises if that reader will never read again.
        """
        view = memoryview(data)
        while view:
            count = min(self._wait(check), self._size - self._at, len(view))
            self._memory[self._at : self._at + count] = view[:count]
            self._at = (self._at + count) % self._size
            for i, descriptor in enumerate(self._written):
                self._room[i] -= count
                os.eventfd_write(descriptor, count)
            view = view[count:]

    def _wait(self, check: Callable[[], None]) -> int:
        """Wait for room, and return the bytes that fit."""
        while (room := min(self._room)) <= 0:
            self._take_read()
            if min(self._room) > 0:
                continue
            check()
            waiting = select.poll()
            waiting.register(self._read[self._room.index(room)], select.POLLIN)
            waiting.poll(_LOOK_MS)
        return room

    def _take_read(self) -> None:
        for i, descriptor in enumerate(self._read):
            with contextlib.suppress(BlockingIOError):
                self._room[i] += os.eventfd_read(descriptor)

    def close(self) -> None:
        """Free the memory and the descriptors. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._memory.close()
        for descriptor in (self._descriptor, *self._written, *self._read):
            os.close(descriptor)


class RingReader:
    """The reading end, in another process.

    Attributes:
        descriptor: readable while there are bytes to `take`.
    """

    def __init__(self, handles: RingHandles) -> None:
        size = os.fstat(handles.memory).st_size
        self._memory = mmap.mmap(handles.memory, size, prot=mmap.PROT_READ)
        os.close(handles.memory)
        self.descriptor, self._read = handles.written, handles.read
        self._size, self._at = size, 0

    def take(self) -> Iterator[bytes]:
        """Yield the bytes written since the last call, in at most two pieces; wait if there are none."""
        left = os.eventfd_read(self.descriptor)
        while left:
            count = min(left, self._size - self._at)
            data = self._memory[self._at : self._at + count]
            self._at = (self._at + count) % self._size
            left -= count
            os.eventfd_write(self._read, count)
            yield data

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
        os.close(self._read)
