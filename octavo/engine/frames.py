"""Messages in a byte stream, each after its length as a 4-byte little-endian integer."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def frame(message: bytes) -> bytes:
    """Return a message with its length in front. The message must be shorter than 4 GiB."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Reassembles messages from pieces of any size."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the messages that are now complete, in order."""
        pending = self._pending
        if not pending and len(data) > _LENGTH.size and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size:
            return [data[_LENGTH.size :]]  # exactly one message, the usual case
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
