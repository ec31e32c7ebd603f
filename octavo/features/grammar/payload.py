"""What the engine half sends with a step."""

from __future__ import annotations

import msgspec

NAME = "grammar"


class Masks(msgspec.Struct):
    """Which tokens a step's guided rows may sample.

    Attributes:
        slots: whose rows are masked.
        bits: for each slot as many bytes as `vocab_size` bits need in whole 32-bit words, the lowest bit first; a set
            bit allows its token. Read before the next step's masks are made: the memory is used again.
        errors: slot -> why its row can't be sampled.
    """

    slots: list[int]
    bits: memoryview
    errors: dict[int, str]


PAYLOAD = Masks
