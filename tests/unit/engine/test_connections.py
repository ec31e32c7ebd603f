"""Sockets between a core and its front ends: messages in any pieces, and readers that are slow or gone."""

from __future__ import annotations

import contextlib
import os
import resource
import socket

import pytest

from octavo.engine.connections import Connections, listen_at
from octavo.engine.frames import Frames, frame

MESSAGES = [b"one", b"", b"three" * 1000]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 10_000])
def test_messages_come_out_whole_in_whatever_pieces_they_come_in(size):
    frames = Frames()
    data = b"".join(map(frame, MESSAGES))
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [message for piece in pieces for message in frames.take(piece)] == MESSAGES


@contextlib.contextmanager
def connected(folder):
    path = str(folder / "core.sock")
    connections = Connections(listen_at(path))
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        assert list(connections.receive(0)) == []
        peer.sendall(frame(b"hello"))
        [(connection, message)] = connections.receive(0)
        assert message == b"hello"
        yield connections, connection, peer
    connections.close()


def test_a_front_end_waits_while_no_descriptor_is_free(short_path):
    """The core goes on with those that it has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(short_path) as (connections, _, peer), socket.socket(socket.AF_UNIX) as late:
        late.connect(str(short_path / "core.sock"))
        late.sendall(frame(b"late"))
        lowest = os.dup(peer.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            assert list(connections.receive(0)) == []
            peer.sendall(frame(b"again"))
            assert [message for _, message in connections.receive(0)] == [b"again"]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert list(connections.receive(0)) == []
        assert [message for _, message in connections.receive(0)] == [b"late"]


def read(connections, peer, count):
    """What arrives at the front end while the core goes on receiving."""
    peer.setblocking(False)
    frames, messages = Frames(), []
    while len(messages) < count:
        with contextlib.suppress(BlockingIOError):
            messages += frames.take(peer.recv(1 << 16))
        assert list(connections.receive(0)) == []
    return messages


def test_what_a_slow_reader_does_not_take_waits_for_it_in_order(short_path):
    with connected(short_path) as (connections, connection, peer):
        messages = [bytes([number]) * 100_000 for number in range(20)]
        for message in messages:
            connections.send(connection, message)
        assert connection.unsent
        assert read(connections, peer, len(messages)) == messages
        connections.send(connection, b"after")
        assert read(connections, peer, 1) == [b"after"]


def test_messages_that_are_sent_together_leave_at_the_end_in_order(short_path):
    with connected(short_path) as (connections, connection, peer):
        peer.setblocking(False)
        connections.send(connection, b"before")
        with connections.together():
            connections.send(connection, b"one")
            connections.send(connection, b"two")
            assert read(connections, peer, 1) == [b"before"]
        assert peer.recv(1 << 16) == frame(b"one") + frame(b"two")
        messages = [bytes([number]) * 100_000 for number in range(20)]
        with connections.together():
            for message in messages:
                connections.send(connection, message)
        assert connection.unsent
        assert read(connections, peer, len(messages)) == messages


def test_messages_that_came_before_the_end_of_a_connection_are_told_before_it(short_path):
    with connected(short_path) as (connections, connection, peer):
        peer.sendall(frame(b"last") + frame(b"never whole")[:-1])
        peer.close()
        told = [*connections.receive(0), *connections.receive(0)]
        assert told == [(connection, b"last"), (connection, None)]


def test_a_reader_that_has_gone_with_much_unread_is_let_go(short_path):
    with connected(short_path) as (connections, connection, peer):
        connections.send(connection, bytes(1 << 20))
        peer.close()
        assert list(connections.receive(0)) == [(connection, None)]
        connections.send(connection, b"nobody reads this")
        assert list(connections.receive(0)) == []


def test_messages_that_are_sent_together_pass_over_a_reader_that_has_gone(short_path):
    with connected(short_path) as (connections, connection, peer), socket.socket(socket.AF_UNIX) as other:
        other.connect(str(short_path / "core.sock"))
        assert list(connections.receive(0)) == []
        other.sendall(frame(b"hello"))
        [(second, _)] = connections.receive(0)
        peer.close()
        assert list(connections.receive(0)) == [(connection, None)]
        with connections.together():
            connections.send(connection, b"nobody reads this")
            connections.send(second, b"news")
        assert read(connections, other, 1) == [b"news"]


def test_what_is_kept_is_sent_before_the_end(short_path):
    with connected(short_path) as (connections, connection, peer):
        connections.send(connection, b"x" * 150_000)
        connections.send(connection, b"farewell")
        peer.settimeout(120)
        connections.close()
        frames, messages = Frames(), []
        while data := peer.recv(1 << 16):
            messages += frames.take(data)
        assert messages[-1] == b"farewell"
