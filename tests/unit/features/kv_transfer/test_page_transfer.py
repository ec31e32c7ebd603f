"""Pages over a connection: what arrives, what is missing, and what happens if either side is gone or sends nonsense."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.features.kv_transfer import fetching
from octavo.features.kv_transfer.buffer import PageBuffer
from octavo.features.kv_transfer.fetching import Connections
from octavo.features.kv_transfer.listener import Listener
from octavo.features.kv_transfer.wire import HELLO, WANTED, read

PAGE = 3000
NAMES = [bytes([i]) * 34 for i in range(8)]


def pages(count: int = 8) -> Tensor:
    return torch.randint(256, (count, PAGE), dtype=torch.uint8)


def ended(connection: socket.socket) -> bool:
    """Wait for the other side to close the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it has not read all
        return True


@pytest.fixture
def buffer() -> PageBuffer:
    return PageBuffer(8, PAGE)


@pytest.fixture
def listener(buffer: PageBuffer) -> Iterator[Listener]:
    made = Listener("127.0.0.1", 0, buffer)
    yield made
    made.close()


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections(PAGE, 20.0)
    yield made
    made.close()


def test_what_is_kept_arrives_and_the_rest_is_missing(
    buffer: PageBuffer, listener: Listener, connections: Connections
) -> None:
    kept = pages(4)
    assert list(buffer.store(NAMES[:4], kept)) == []
    order = [2, 7, 0, 1, 6, 3]
    into = torch.zeros(len(order), PAGE, dtype=torch.uint8)
    for _ in range(2):  # over the same connection
        assert list(connections.fetch(listener.address, [NAMES[i] for i in order], into)) == [1, 4]
        for row, i in enumerate(order):
            assert torch.equal(into[row], kept[i]) if i < 4 else not into[row].any()
    assert len(connections._idle[listener.address]) == 1
    assert list(connections.fetch(listener.address, NAMES[5:], into[:3])) == [0, 1, 2]


def test_several_fetches_at_once(buffer: PageBuffer, listener: Listener, connections: Connections) -> None:
    kept = pages()
    buffer.store(NAMES, kept)

    def fetch(i: int) -> bool:
        into = torch.empty(8, PAGE, dtype=torch.uint8)
        names = NAMES[i % 8 :] + NAMES[: i % 8]
        return not connections.fetch(listener.address, names, into) and torch.equal(into, kept.roll(-(i % 8), 0))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fetch, range(40)))


def test_a_page_on_its_way_is_waited_for(buffer: PageBuffer, listener: Listener, connections: Connections) -> None:
    kept = pages(2)
    buffer.expect(NAMES[:2])
    into = torch.zeros(2, PAGE, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as threads:
        fetched = threads.submit(connections.fetch, listener.address, NAMES[:2], into)
        buffer.store(NAMES[:1], kept[:1])
        assert not fetched.done() or fetched.result() == [1]
        buffer.store(NAMES[1:2], kept[1:])
        assert list(fetched.result(30)) == []
    assert torch.equal(into, kept)


def test_a_page_that_is_dropped_is_not_waited_for(buffer: PageBuffer) -> None:
    buffer.expect(NAMES[:1])
    with ThreadPoolExecutor(1) as threads:

        def look() -> list[bool]:
            with buffer.read(NAMES[:1], 600.0) as found:
                return [page is None for page in found]

        found = threads.submit(look)
        buffer.drop(NAMES[:1])
        assert found.result(30) == [True]


def test_a_full_buffer_says_what_it_has_no_room_for_and_a_page_being_read_stays(buffer: PageBuffer) -> None:
    kept = pages()
    assert list(buffer.store(NAMES[:6], kept[:6])) == []
    assert list(buffer.store([b"x", b"y", b"z"], kept[:3])) == [2]
    with buffer.read(NAMES[:1]) as found:
        buffer.drop(NAMES)
        assert list(buffer.store([b"1", b"2", b"3", b"4", b"5", b"6"], kept[:6])) == [5], "one place is being read"
        assert found[0] is not None
        assert torch.equal(torch.from_numpy(found[0]), kept[0])
    assert list(buffer.store([b"6"], kept[:1])) == []


def test_a_server_that_was_started_anew_is_connected_to_again(connections: Connections, buffer: PageBuffer) -> None:
    kept = pages(1)
    buffer.store(NAMES[:1], kept)
    first = Listener("127.0.0.1", 0, buffer)
    into = torch.empty(1, PAGE, dtype=torch.uint8)
    assert list(connections.fetch(first.address, NAMES[:1], into)) == []
    first.close()
    second = Listener("127.0.0.1", first.address[1], buffer)
    try:
        into.zero_()
        assert list(connections.fetch(second.address, NAMES[:1], into)) == []
        assert torch.equal(into, kept)
    finally:
        second.close()


def test_a_server_that_is_not_there_is_not_tried_at_once_again(
    connections: Connections, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.close()
    into = torch.empty(1, PAGE, dtype=torch.uint8)
    with pytest.raises(OSError):
        connections.fetch(listener.address, NAMES[:1], into)
    with pytest.raises(OSError, match="shortly before"):
        connections.fetch(listener.address, NAMES[:1], into)


def test_pages_of_another_size_are_refused(listener: Listener) -> None:
    other = Connections(PAGE + 1, 20.0)
    with pytest.raises(OSError, match=f"sends pages of {PAGE} bytes"):
        other.fetch(listener.address, NAMES[:1], torch.empty(1, PAGE + 1, dtype=torch.uint8))


@pytest.mark.parametrize("sent", [WANTED.pack(0, 34), WANTED.pack(1 << 20, 34), WANTED.pack(1, 1 << 20), b"GET / HTTP"])
def test_nonsense_ends_the_connection_and_no_other(
    sent: bytes, buffer: PageBuffer, listener: Listener, connections: Connections
) -> None:
    with socket.create_connection(listener.address, 20) as connection:
        read(connection, HELLO.size)
        connection.sendall(sent)
        assert ended(connection)
    buffer.store(NAMES[:1], pages(1))
    assert list(connections.fetch(listener.address, NAMES[:1], torch.empty(1, PAGE, dtype=torch.uint8))) == []


@pytest.mark.parametrize(
    "answer", [b"OKV1", b"HTTP/1.1 400 Bad Request\r\n\r\n", HELLO.pack(b"OKV1", PAGE) + b"\xff" * 8]
)
def test_a_server_that_is_no_sender_is_an_error(answer: bytes, connections: Connections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):  # the client may have closed it already
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while not ended(connection):
                    """Read what the client sends."""

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError):
            connections.fetch(server.getsockname(), NAMES[:1], torch.empty(1, PAGE, dtype=torch.uint8))
        thread.join(30)


def test_a_port_that_is_taken_is_named(listener: Listener, buffer: PageBuffer) -> None:
    with pytest.raises(ConfigError, match=f"kv_ip='127.0.0.1', port {listener.address[1]}"):
        Listener("127.0.0.1", listener.address[1], buffer)


def test_few_connections_are_kept(
    buffer: PageBuffer, listener: Listener, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_IDLE_MOST", 0)
    buffer.store(NAMES[:1], pages(1))
    connections.fetch(listener.address, NAMES[:1], torch.empty(1, PAGE, dtype=torch.uint8))
    assert connections._idle[listener.address] == []
