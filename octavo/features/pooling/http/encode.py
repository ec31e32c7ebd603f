"""Encode vectors as bytes, in the number formats and byte orders that requests may name."""

from __future__ import annotations

import sys
from typing import Literal

from octavo.features.pooling.params import Pooled

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]


def encode(pooled: Pooled, dtype: EmbedDtype = "float32", endianness: Endianness = "native") -> bytes:
    """Return the numbers, row by row, in a format (`rounding.rounded`) and a byte order."""
    order = sys.byteorder if endianness == "native" else endianness
    if (dtype, order) == ("float32", "little"):
        return pooled.data
    # Imported here: numpy costs a server 12 MB and 0.1 s, and most never need it.
    from octavo.features.pooling.http.rounding import rounded

    made = rounded(pooled, dtype)
    return (made if order == sys.byteorder else made.byteswap()).tobytes()


def signs(pooled: Pooled) -> bytes:
    """Return a bit for each number, set if it is positive: eight to a byte, highest bit first."""
    from octavo.features.pooling.http.rounding import packed_signs

    return packed_signs(pooled).tobytes()
