"""What the engine half sends with a step."""

from __future__ import annotations

import msgspec

from octavo.core.embeds import OPTION as NAME
from octavo.core.embeds import FloatType

__all__ = ["NAME", "PAYLOAD", "Piece", "Pieces"]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of a step: `data`, as in `EmbedSpan`, from token `start` of its batch on."""

    start: int
    dtype: FloatType
    data: memoryview


class Pieces(msgspec.Struct):
    """The embeddings among a step's tokens."""

    pieces: list[Piece]


PAYLOAD = Pieces
