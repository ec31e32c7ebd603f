"""Round numbers to formats of fewer bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.features.pooling.http.encode import EmbedDtype
from octavo.features.pooling.params import Pooled


def rounded(pooled: Pooled, dtype: EmbedDtype) -> NDArray[np.generic]:
    """Return the numbers as a flat array, rounded to the format, ties to even.

    Overflow becomes infinity, or in "fp8_e4m3", which has none, the largest number. The 8-bit formats are those of the
    OCP specification (https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8).
    """
    numbers = _numbers(pooled)
    match dtype:
        case "float32":
            return numbers
        case "float16":
            with np.errstate(over="ignore"):
                return numbers.astype(np.float16)
        case "bfloat16":
            return _bfloat16(numbers)
        case "fp8_e4m3":
            return _fp8(numbers, exponent=4)
        case "fp8_e5m2":
            return _fp8(numbers, exponent=5)


def packed_signs(pooled: Pooled) -> NDArray[np.uint8]:
    """Return a bit for each number, set if it is positive: eight to a byte, highest bit first."""
    return np.packbits(_numbers(pooled) > 0)


def _numbers(pooled: Pooled) -> NDArray[np.float32]:
    return np.frombuffer(pooled.data, dtype="<f4").astype(np.float32)


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the rounded upper halves of the bits. NaN stays NaN, without its sign and payload."""
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _fp8(numbers: NDArray[np.float32], exponent: int) -> NDArray[np.uint8]:
    values = _fp8_values(exponent)
    middles = (values[1:] + values[:-1]) / 2
    sizes = np.abs(numbers.astype(np.float64))
    code = np.searchsorted(middles, sizes)  # the lower one of a tie
    tied = (code < len(middles)) & (sizes == middles[np.minimum(code, len(middles) - 1)])
    code = code + (tied & (code % 2 == 1))
    code = np.where(np.isnan(numbers), 0x7F, code)
    return (code | (np.signbit(numbers).astype(np.int64) << 7)).astype(np.uint8)


def _fp8_values(exponent: int) -> NDArray[np.float64]:
    """Return code -> value of the positive numbers; infinity as the power of two that its code would be."""
    mantissa = 7 - exponent
    bias, steps = (1 << (exponent - 1)) - 1, 1 << mantissa
    last = 0x7E if exponent == 4 else 0x7C
    codes = np.arange(last + 1)
    power, part = codes >> mantissa, codes & (steps - 1)
    small = part / steps * 2.0 ** (1 - bias)
    return np.where(power == 0, small, (1 + part / steps) * 2.0 ** (power.astype(np.float64) - bias))
