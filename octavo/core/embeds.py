"""Prompts that hold embeddings: rows of numbers that stand where the embeddings of tokens would."""

from __future__ import annotations

from typing import Literal

import msgspec

OPTION = "prompt_embeds"
"""The name under which requests carry their list of `EmbedSpan`."""
PLACEHOLDER = -1
"""Among token ids: an embedding stands here, and no token. It is no repetition of anything."""

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
