"""The messages between the engine and the ranks of another machine, in frames over TCP (msgspec's MessagePack).

A rank's machine sends a `Join` and receives the rank's place, or the reason why it is refused. From then on the engine
sends the bytes of its ring (`rank_wire.py`), and the machine what its rank answers. Nothing is encrypted; the
digest of the settings, which includes `--node-key`, is all that a machine has to show.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from octavo.core.worker_info import RankPlace
from octavo.engine.frames import frame

BEAT_S = 1.0
"""Seconds between two signs of life of a machine."""
SILENCE_S = 5.0
"""Seconds without one after which it counts as lost."""
_LENGTH = struct.Struct("<I")
_MOST = 1 << 20


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A machine offers to run a rank. `settings`: digest of what must be equal on all machines."""

    rank: int
    settings: str


class Joined(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank's place; or, without one, why the machine is refused."""

    place: RankPlace | None
    refusal: str = ""


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message of the rank, encoded by `rank_wire.py`."""

    message: bytes


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The machine and the rank's process are there."""


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank's process has ended, or is stopped. `lines`: its last log lines."""

    reason: str
    lines: list[str]


FromNode = Join | Answer | Beat | Ended

_encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
decode_joined = msgspec.msgpack.Decoder(Joined).decode


def framed(message: FromNode | Joined) -> bytes:
    return frame(_encode(message))


def read_one(peer: socket.socket) -> bytes:
    """Read exactly one short message from a socket, and nothing behind it.

    Raises:
        OSError: the peer has disconnected, or it sends something else.
    """
    size = _LENGTH.unpack(_exactly(peer, _LENGTH.size))[0]
    if size > _MOST:
        raise OSError(f"a first message of {size} bytes")
    return _exactly(peer, size)


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other side has disconnected")
        data += more
    return data
