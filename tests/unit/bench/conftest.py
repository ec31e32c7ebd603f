"""What the tests of several benchmarks share."""

from __future__ import annotations

import socket
import threading

import pytest


class Server:
    """Answers every request on a connection of its own with the same bytes, in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pieces = pieces
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                data = b""
                while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                    data += connection.recv(1 << 16)
                for piece in self._pieces:
                    connection.sendall(piece)


@pytest.fixture
def answering() -> type[Server]:
    """The class of a server that answers every request with the pieces that it is made with."""
    return Server
