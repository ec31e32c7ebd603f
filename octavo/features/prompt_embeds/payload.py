"""The payload of a step."""

from __future__ import annotations

import msgspec

from octavo.features.prompt_embeds.span import FloatType

NAME = "prompt_embeds"


class EmbedPiece(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of a step: `data`, as in `EmbedSpan`, from token `start` of its batch on."""

    start: int
    dtype: FloatType
    data: memoryview


class Pieces(msgspec.Struct):
    """The embeddings among a step's tokens."""

    pieces: list[EmbedPiece]


PAYLOAD = Pieces
