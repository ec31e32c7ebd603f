"""`Listener`: sends pages to other servers that ask for them by name."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

from octavo.core.errors import ConfigError
from octavo.features.kv_transfer.buffer import PageBuffer
from octavo.features.kv_transfer.wire import (
    FORMAT,
    HELLO,
    MOST_NAME_BYTES,
    MOST_PAGES,
    WANTED,
    ClosedError,
    indices,
    limit_waits,
    read,
)

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 256
_STALLED_S = 60.0
"""A connection whose other side reads nothing for as long is closed."""
_EXPECTED_S = 5.0
"""Longest wait for a page that is on its way to the buffer."""


class Listener:
    """A thread that accepts connections, and one for each of them.

    Attributes:
        address: host and port.

    Raises:
        ConfigError: there can't be a server at this address.
    """

    def __init__(self, host: str, port: int, buffer: PageBuffer) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: no server can be opened at kv_ip={host!r}, port {port}: {error}. Name an address "
                "of this machine, and a free port for each rank and replica (0 lets the system choose)."
            ) from None
        self.address = host, int(self._socket.getsockname()[1])
        self._buffer = buffer
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="octavo-kv-listener", daemon=True).start()

    def close(self) -> None:
        """Close all connections. No page is read any more when this returns."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                log.exception("failed to accept a connection for KV blocks")
                continue
            with self._lock:
                if self._closed or len(self._connections) >= _MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="octavo-kv-sender", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            limit_waits(connection, _STALLED_S)
            connection.sendall(HELLO.pack(FORMAT, self._buffer.page_bytes))
            connection.settimeout(None)
            while True:
                self._answer(connection)
        except ClosedError:
            pass
        except BlockingIOError:  # nothing was asked, or read, for a while
            pass
        except OSError as error:
            log.debug("a connection for KV blocks ended: %s", error)
        except Exception:
            log.exception("failed to send KV blocks")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        count, size = WANTED.unpack(read(connection, WANTED.size))
        if not 0 < count <= MOST_PAGES or not 0 < size <= MOST_NAME_BYTES:
            raise ClosedError(f"{count} names of {size} bytes each are not a request for KV blocks")
        names = read(connection, count * size)
        wanted = [names[at : at + size] for at in range(0, len(names), size)]
        with self._buffer.read(wanted, _EXPECTED_S) as pages:
            missing = [index for index, page in enumerate(pages) if page is None]
            connection.sendall(indices(missing))
            for page in pages:
                if page is not None:
                    connection.sendall(page.data)
