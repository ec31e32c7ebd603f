"""`Connections`: an engine core's sockets to its front ends. No call blocks on a slow front end."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

from octavo.engine.frames import Frames, frame

_BACKLOG = 128
_PIECE = 1 << 18
_FAREWELL_S = 1.0


def listen_at(path: str) -> socket.socket:
    """Return a listening socket. Front ends can connect from now on; `Connections` accepts them."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(_BACKLOG)
    return listener


class Connection:
    """Connection to one front end. Bytes that it can't take yet are buffered, without a limit, and sent later."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.unsent = bytearray()
        self._frames = Frames()

    def send(self, message: bytes, *, later: bool = False) -> None:
        """Send a message, or with `later` only buffer it."""
        data = frame(message)
        sent = 0 if self.unsent or later else self._write(data)
        if sent < len(data):
            self.unsent += data[sent:]

    def flush(self) -> None:
        """Send as much of the buffer as possible now."""
        del self.unsent[: self._write(self.unsent)]

    def receive(self) -> list[bytes] | None:
        """Return the messages that have arrived; None if the front end has disconnected."""
        try:
            data = self.peer.recv(_PIECE)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        return self._frames.take(data) if data else None

    def close(self) -> None:
        """Send the buffer, for at most a second, and close the socket."""
        with contextlib.suppress(OSError):
            self.peer.settimeout(_FAREWELL_S)
            self.peer.sendall(self.unsent)
        self.peer.close()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.peer.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # disconnected; `receive` reports it
            return len(data)


class Connections:
    """The open connections of a listening socket."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._open: dict[int, Connection] = {}
        self._together: set[Connection] | None = None
        """Those with messages for the end of `together`; None outside of it."""
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def send(self, connection: Connection, message: bytes) -> None:
        """Send a message, without waiting. Does nothing if the front end has disconnected."""
        connection.send(message, later=self._together is not None)
        if self._together is not None:
            self._together.add(connection)
        elif connection.unsent:
            self._watch(connection)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Hold messages that are sent meanwhile, and send them at the end by one call for each connection.

        Each call gives up the GIL, and then waits for a thread that computes.
        """
        self._together = set()
        try:
            yield
        finally:
            held, self._together = self._together, None
            for connection in held:
                connection.flush()
                if connection.unsent:  # never of one that has disconnected, which can't be watched
                    self._watch(connection)

    def receive(self, wait_ms: int) -> Iterator[tuple[Connection, bytes | None]]:
        """Wait for messages and yield them; None from a front end that has disconnected.

        Args:
            wait_ms: the longest wait for the first message, in milliseconds.
        """
        for descriptor, event in self._poll.poll(wait_ms):
            connection = self._open.get(descriptor)
            if connection is None:
                self._accept()
                continue
            if event & select.POLLOUT:
                connection.flush()
                self._watch(connection)
            if event & ~select.POLLOUT:
                messages = connection.receive()
                if messages is None:
                    self._drop(descriptor)
                    yield connection, None
                else:
                    yield from ((connection, message) for message in messages)

    def close(self) -> None:
        self._listener.close()
        for connection in self._open.values():
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # also if no descriptor is free: the front end waits, and is looked at again
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            self._open[peer.fileno()] = Connection(peer)
            self._poll.register(peer, select.POLLIN)

    def _watch(self, connection: Connection) -> None:
        self._poll.modify(connection.peer, select.POLLIN | (select.POLLOUT if connection.unsent else 0))

    def _drop(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        connection = self._open.pop(descriptor)
        connection.unsent.clear()
        connection.peer.close()
