"""`EmbedSpan`: embeddings of a prompt, as a request's option holds them."""

from __future__ import annotations

from typing import Literal

import msgspec

FloatType = Literal["float32", "float16", "bfloat16"]
FLOAT_BYTES: dict[FloatType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class EmbedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive embeddings.

    Attributes:
        start: position of the first one in the prompt.
        count: number of embeddings.
        dtype: dtype of `data`, which is [count, hidden size], little-endian.
    """

    start: int
    count: int
    dtype: FloatType
    data: memoryview
