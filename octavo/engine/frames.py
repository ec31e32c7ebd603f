"""Messages in a stream of bytes: each comes after its length, 4 bytes, the lowest first."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def frame(message: bytes) -> bytes:
    """A message as it is sent; it must be shorter than 4 GiB."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Puts together what comes in pieces of any size."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """The messages that are complete with `data`, in order."""
        pending = self._pending
        if not pending and len(data) > _LENGTH.size and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size:
            return [data[_LENGTH.size :]]  # one message and no more, as most pieces are
        pending += data
        messages, at = [], 0
        while len(pending) - at >= _LENGTH.size:
            start = at + _LENGTH.size
            end = start + _LENGTH.unpack_from(pending, at)[0]
            if end > len(pending):
                break
            messages.append(bytes(pending[start:end]))
            at = end
        del pending[:at]
        return messages
