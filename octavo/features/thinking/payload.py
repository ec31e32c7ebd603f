"""What the engine half sends with a step."""

from __future__ import annotations

import msgspec

NAME = "thinking"


class Forced(msgspec.Struct):
    """Slot -> the one token that may come next."""

    tokens: dict[int, int]


PAYLOAD = Forced
