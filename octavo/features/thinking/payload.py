"""The payload of a step."""

from __future__ import annotations

import msgspec

NAME = "thinking"


class Forced(msgspec.Struct):
    """Slot -> the only allowed next token."""

    tokens: dict[int, int]


PAYLOAD = Forced
