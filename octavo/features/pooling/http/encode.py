"""Vectors as bytes: the number formats and byte orders that clients may ask for."""

from __future__ import annotations

import sys
from typing import Literal

from octavo.features.pooling.params import Pooled

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]


def encode(pooled: Pooled, dtype: EmbedDtype = "float32", endianness: Endianness = "native") -> bytes:
    """The numbers, row after row, in a format and a byte order (`rounding.rounded`)."""
    order = sys.byteorder if endianness == "native" else endianness
    if (dtype, order) == ("float32", "little"):
        return pooled.data
    # numpy costs a server 12 MB and a tenth of a second: one that never needs it does without.
    from octavo.features.pooling.http.rounding import rounded

    made = rounded(pooled, dtype)
    return (made if order == sys.byteorder else made.byteswap()).tobytes()


def signs(pooled: Pooled) -> bytes:
    """Whether each number is positive: eight to a byte, the first in its highest bit."""
    from octavo.features.pooling.http.rounding import packed_signs

    return packed_signs(pooled).tobytes()
