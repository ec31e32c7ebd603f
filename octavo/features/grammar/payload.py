"""The payload of a step."""

from __future__ import annotations

import msgspec

NAME = "grammar"


class Masks(msgspec.Struct):
    """Allowed tokens of a step's guided rows.

    Attributes:
        slots: the slot of each mask. The masks of a slot with drafts are consecutive: for the token after no draft,
            after the first draft, and so on, perhaps for fewer drafts than the step verifies.
        bits: the masks: ceil(vocab_size / 32) 32-bit words each, lowest bit first; a set bit allows its token. Must be
            read before the next step's masks are computed, which reuse the memory.
        errors: index of a mask -> reason why its row can't be sampled.
    """

    slots: list[int]
    bits: memoryview
    errors: dict[int, str]


PAYLOAD = Masks
