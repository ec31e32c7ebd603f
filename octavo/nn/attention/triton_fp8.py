"""FP8 keys and values on a GPU: rounding to FP8, and conversion to float16 for computing.

Two adjacent channels are loaded as one 16-bit word and split into two float16 tiles, of the even and of the odd
channels. So the tensor cores get ordinary tiles of 16-bit elements, and two or three integer operations on packed words
replace each pair of conversions: E5M2 is the upper half of a float16, and E4M3 shifted right by one bit is a float16 of
1/256 its value. Both are exact. Formats: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(x, FORM: tl.constexpr):
    """Round float32 to the bits of FP8 (uint8), to nearest, ties to even, saturating at the largest number.

    Scaling by a power of two maps the format's smallest normal number to that of float32, so only the mantissa has to
    be rounded, also for subnormal numbers.
    """
    if FORM == 1:
        y = tl.minimum(tl.maximum(x, -448.0), 448.0) * 7.52316384526264e-37
        bits = y.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        code = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    else:
        y = tl.minimum(tl.maximum(x, -57344.0), 57344.0) * 1.925929944387236e-34
        bits = y.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        code = (size + 0xFFFFF + ((size >> 21) & 1)) >> 21
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def narrow_by(x, inverse):
    """Round float32, times the number at `inverse`, to the bits of E4M3."""
    return narrow(x * tl.load(inverse), 1)


@triton.jit
def widen(words, FORM: tl.constexpr, MEANS: tl.constexpr):
    """Convert uint16 words of two FP8 numbers to two float16 tiles, of the lower and the upper bytes; see `unit`.

    MEANS, from `means_of`, selects the method: integer operations on one number at a time (the only one that Triton's
    interpreter supports), the same on pairs of numbers, or the processor's own conversion.
    """
    if MEANS == 2 and FORM == 1:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b;
            .reg .b32 x, y;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632;
            }""",
            "=r,=r,r",
            [words],
            (tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif MEANS > 0 and FORM == 1:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            prmt.b32 t, $2, 0, 0x2404;
            shr.b32 u, t, 1;
            and.b32 u, u, 0x3f803f80;
            lop3.b32 $0, t, 0x80008000, u, 0xEA;
            shr.b32 u, $2, 1;
            and.b32 u, u, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, u, 0xEA;
            }""",
            "=&r,=r,r",
            [words],
            (tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif MEANS > 0:
        low, high = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0, 0x2404;
            and.b32 $1, $2, 0xff00ff00;
            }""",
            "=&r,=r,r",
            [words],
            (tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # Move the bits to their places in float16: the sign to 15, E4M3's others from 13 down.
        first = (words & 0xFF) << 8
        second = words & 0xFF00
        if FORM == 1:
            first = (first & 0x8000) | ((first & 0x7F00) >> 1)
            second = (second & 0x8000) | ((second & 0x7F00) >> 1)
        low = first.to(tl.float16, bitcast=True)
        high = second.to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def unit(FORM: tl.constexpr, MEANS: tl.constexpr):
    """Return the factor by which numbers from `widen` must be multiplied."""
    if FORM == 1 and MEANS < 2:
        factor = 256.0
    else:
        factor = 1.0
    return factor
