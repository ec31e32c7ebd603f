"""The payload of a step."""

from __future__ import annotations

import msgspec

NAME = "grammar"


class Masks(msgspec.Struct):
    """Allowed tokens of a step's guided rows.

    Attributes:
        slots: slots of the masked rows.
        bits: one mask for each slot: ceil(vocab_size / 32) 32-bit words, lowest bit first; a set bit allows its token.
            Must be read before the next step's masks are computed, which reuse the memory.
        errors: slot -> reason why its row can't be sampled.
    """

    slots: list[int]
    bits: memoryview
    errors: dict[int, str]


PAYLOAD = Masks
