"""`Connections`: fetches pages from other servers."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Collection, Sequence

from torch import Tensor

from octavo.features.kv_transfer.offer import Address
from octavo.features.kv_transfer.wire import FORMAT, HELLO, WANTED, fill, limit_waits, read, read_indices

_IDLE_MOST = 8
"""Most connections to a server that are kept for later."""
_CONNECT_S = 5.0
_PAUSE_S = 30.0
"""A server that could not be reached is not tried again for as long."""


class PausedError(OSError):
    """A server was not tried, since it could not be reached shortly before."""


class Connections:
    """Connections to other servers, reused one after the other.

    Args:
        page_bytes: of a page here.
        timeout: seconds without a byte after which a fetch fails.
    """

    def __init__(self, page_bytes: int, timeout: float) -> None:
        self._page_bytes = page_bytes
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: dict[Address, list[socket.socket]] = {}
        self._again: dict[Address, float] = {}
        """When a server that could not be reached may be tried again."""
        self._closed = False

    def fetch(self, address: Address, names: Sequence[bytes], into: Tensor) -> Collection[int]:
        """Fetch pages to `into` [n, page bytes] uint8, on the CPU; return the indices of those that are missing.

        Raises:
            OSError: the server can't be reached, is not one of this model, or closed the connection.
        """
        with self._lock:
            idle = self._idle.get(address)
            connection = idle.pop() if idle else None
        if connection is not None:
            try:
                return self._use(connection, address, names, into)
            except OSError:
                connection.close()  # the server may have closed it, or may have restarted
        connection = self._open(address)
        try:
            return self._use(connection, address, names, into)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [one for several in self._idle.values() for one in several]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _open(self, address: Address) -> socket.socket:
        if time.monotonic() < self._again.get(address, 0.0):
            raise PausedError("it could not be reached shortly before")
        try:
            connection = socket.create_connection(address, min(_CONNECT_S, self._timeout))
        except OSError:
            self._again[address] = time.monotonic() + _PAUSE_S
            raise
        try:
            limit_waits(connection, self._timeout)
            form, page_bytes = HELLO.unpack(read(connection, HELLO.size))
            if form != FORMAT or page_bytes != self._page_bytes:
                raise OSError(
                    f"{address[0]}:{address[1]} sends pages of {page_bytes} bytes in the format {form!r}; here they "
                    f"have {self._page_bytes} in {FORMAT!r}"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _use(
        self, connection: socket.socket, address: Address, names: Sequence[bytes], into: Tensor
    ) -> Collection[int]:
        connection.sendall(WANTED.pack(len(names), len(names[0])) + b"".join(names))
        missing = read_indices(connection, len(names))
        bounds = [-1, *missing, len(names)]
        for before, after in itertools.pairwise(bounds):
            if after - before > 1:
                fill(connection, into[before + 1 : after].numpy().data.cast("B"))
        with self._lock:
            idle = self._idle.setdefault(address, [])
            keep = not self._closed and len(idle) < _IDLE_MOST
            if keep:
                idle.append(connection)
        if not keep:
            connection.close()
        return missing
