"""What two servers say to each other on a connection by which pages are fetched. All numbers are big-endian.

1. The sender: the format (4 bytes), and the bytes of a page (8).
2. The other: how many pages it wants (4), the bytes of a name (4), and the names.
3. The sender: how many of them it lacks (4), their indices (4 each, rising), and then the other pages in this order.

2 and 3 may repeat. A side that does not understand the other closes the connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

HELLO = struct.Struct("!4sQ")
FORMAT = b"OKV1"
WANTED = struct.Struct("!II")
COUNT = struct.Struct("!I")
MOST_PAGES = 1 << 16
MOST_NAME_BYTES = 64


class ClosedError(OSError):
    """The other side has closed the connection."""


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Have each read or write fail that waits longer than this. The socket stays a blocking one, so that a large read
    is one call of the system."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def fill(connection: socket.socket, into: memoryview) -> None:
    """Read until `into`, of bytes, is full.

    Raises:
        ClosedError: the connection has ended.
        OSError: it failed, or nothing came in time.
    """
    got = 0
    while got < len(into):
        count = connection.recv_into(into[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise ClosedError("the connection was closed")
        got += count


def read(connection: socket.socket, count: int) -> bytes:
    """Read as many bytes; raises as `fill`."""
    data = bytearray(count)
    fill(connection, memoryview(data))
    return bytes(data)


def indices(numbers: Sequence[int]) -> bytes:
    return COUNT.pack(len(numbers)) + struct.pack(f"!{len(numbers)}I", *numbers)


def read_indices(connection: socket.socket, below: int) -> list[int]:
    """Read rising indices below a bound; raises as `fill`, and OSError for anything else."""
    (count,) = COUNT.unpack(read(connection, COUNT.size))
    if count > below:
        raise OSError(f"the other server says that it lacks {count} of {below} pages")
    found = list(struct.unpack(f"!{count}I", read(connection, 4 * count)))
    if any(index >= below for index in found) or found != sorted(set(found)):
        raise OSError("the other server's list of missing pages is malformed")
    return found
