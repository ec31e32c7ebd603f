"""Vectors as bytes: the number formats and byte orders that clients may ask for."""

from __future__ import annotations

import sys
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.core.pooling import Pooled

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]


def encode(pooled: Pooled, dtype: EmbedDtype = "float32", endianness: Endianness = "native") -> bytes:
    """The numbers, row after row, each rounded to the nearest of its format, to the even one of two.

    What is too large becomes infinite, or in "fp8_e4m3", which has no infinity, the largest. The formats of 8 bits are
    those of the OCP specification (https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8).
    """
    numbers: NDArray[np.float32] = np.frombuffer(pooled.data, dtype="<f4").astype(np.float32)
    match dtype:
        case "float32":
            made: NDArray[np.generic] = numbers
        case "float16":
            with np.errstate(over="ignore"):
                made = numbers.astype(np.float16)
        case "bfloat16":
            made = _bfloat16(numbers)
        case "fp8_e4m3":
            made = _fp8(numbers, exponent=4)
        case "fp8_e5m2":
            made = _fp8(numbers, exponent=5)
    swap = endianness != "native" and endianness != sys.byteorder
    return (made.byteswap() if swap else made).tobytes()


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of the bits, rounded. No number stays none: its sign and payload are not kept."""
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _fp8(numbers: NDArray[np.float32], exponent: int) -> NDArray[np.uint8]:
    values = _fp8_values(exponent)
    middles = (values[1:] + values[:-1]) / 2
    sizes = np.abs(numbers.astype(np.float64))
    code = np.searchsorted(middles, sizes)  # of two that are equally near the lower one
    tied = (code < len(middles)) & (sizes == middles[np.minimum(code, len(middles) - 1)])
    code = code + (tied & (code % 2 == 1))
    code = np.where(np.isnan(numbers), 0x7F, code)
    return (code | (np.signbit(numbers).astype(np.int64) << 7)).astype(np.uint8)


def _fp8_values(exponent: int) -> NDArray[np.float64]:
    """Code -> value of the positive numbers; infinity stands as the power of two that it takes the place of."""
    mantissa = 7 - exponent
    bias, steps = (1 << (exponent - 1)) - 1, 1 << mantissa
    last = 0x7E if exponent == 4 else 0x7C
    codes = np.arange(last + 1)
    power, part = codes >> mantissa, codes & (steps - 1)
    small = part / steps * 2.0 ** (1 - bias)
    return np.where(power == 0, small, (1 + part / steps) * 2.0 ** (power.astype(np.float64) - bias))
