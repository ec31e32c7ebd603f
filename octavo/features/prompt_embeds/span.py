"""`EmbedSpan`: embeddings of a prompt, as they travel in a request's option."""

from __future__ import annotations

from typing import Literal

import msgspec

FloatType = Literal["float32", "float16", "bfloat16"]
FLOAT_BYTES: dict[FloatType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class EmbedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings that follow each other.

    Attributes:
        start: the first one's position in the prompt.
        count: how many there are.
        dtype: of `data`, which is little-endian: [count, hidden size].
    """

    start: int
    count: int
    dtype: FloatType
    data: memoryview
