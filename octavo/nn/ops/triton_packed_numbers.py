"""Widen numbers of 4 and 8 bits in registers, for the kernels of packed experts.

Codes are E4M3, E5M2 or integers of 8 bits, or words of 16 bits with 4 fields of 4 bits as in `triton_words.py`:
integers less 8, floats (E2M1), or places in a table of 16 numbers. KIND says which: "integers" (also of all codes of
8 bits), "e2m1", "table" with a `book` of the numbers, or "planes" with the book of `planes_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_words import integers_of, selected, small_integers_of


@triton.jit
def numbers_of(code, book, FIELD: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers of codes, or of a field of words, in float32; planes are those of float16."""
    if code.dtype != tl.int16:
        return code.to(tl.float32)
    elif KIND == "planes":
        return selected(code, book, FIELD, tl.float16).to(tl.float32)
    elif KIND == "table":
        return tl.load(book + ((code.to(tl.int32) >> (4 * FIELD)) & 15), eviction_policy="evict_last").to(tl.float32)
    elif KIND == "e2m1":
        field = (code.to(tl.int32) >> (4 * FIELD)) & 15
        # Exponent and mantissa of E2M1 as those of float32, whose exponents have a bias larger by 126.
        return (((field & 8) << 28) | ((field & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        return integers_of(code, FIELD, 4)


@triton.jit
def narrow_numbers_of(code, book, FIELD: tl.constexpr, KIND: tl.constexpr, BITS16: tl.constexpr, FAST: tl.constexpr):
    """Return `numbers_of` as BITS16, a dtype of 16 bits which has them exactly, but for those of a table, or float32.

    FAST: by few instructions for bfloat16, of compute capability 9.0.
    Args:
        book: planes are those of BITS16, or of float16 for float32.
    """
    if KIND == "planes" and BITS16.primitive_bitwidth == 16:
        return selected(code, book, FIELD, BITS16)
    elif FAST and tl.bfloat16 == BITS16 and code.dtype == tl.int16 and KIND == "integers":
        return small_integers_of(code, FIELD)
    elif FAST and tl.bfloat16 == BITS16 and code.dtype == tl.int16 and KIND == "e2m1":
        return _small_floats_of(code, FIELD)
    elif FAST and tl.bfloat16 == BITS16 and code.dtype == tl.int8:
        return _integers_in_bfloat16(code)
    elif FAST and tl.bfloat16 == BITS16 and code.dtype == tl.float8e4nv:
        return _floats_in_bfloat16(code.to(tl.int8, bitcast=True))
    else:
        return numbers_of(code, book, FIELD, KIND).to(BITS16)


@triton.jit
def _integers_in_bfloat16(code):
    """Return integers of 8 bits: 128 plus their low 7 bits, less 128 or 256."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 w, low, high;
        prmt.b32 w, $2, 0x43434343, 0x4140;
        and.b32 low, w, 0xFF7FFF7F;
        and.b32 high, w, 0xFF80FF80;
        sub.rn.bf16x2 $0, low, high;
        prmt.b32 w, $2, 0x43434343, 0x4342;
        and.b32 low, w, 0xFF7FFF7F;
        and.b32 high, w, 0xFF80FF80;
        sub.rn.bf16x2 $1, low, high;
        }""",
        "=r,=r,r",
        [code],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _floats_in_bfloat16(code):
    """Return E4M3, whose exponent and mantissa become those of bfloat16, times 2 ** 120, the ratio of the biases."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 w, number, factor;
        mov.b32 factor, 0x7B807B80;
        prmt.b32 w, $2, 0, 0x1404;
        shr.u32 number, w, 4;
        and.b32 number, number, 0x07F007F0;
        lop3.b32 number, w, 0x80008000, number, 0xEA;
        mul.rn.bf16x2 $0, number, factor;
        prmt.b32 w, $2, 0, 0x3424;
        shr.u32 number, w, 4;
        and.b32 number, number, 0x07F007F0;
        lop3.b32 number, w, 0x80008000, number, 0xEA;
        mul.rn.bf16x2 $1, number, factor;
        }""",
        "=r,=r,r",
        [code],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _small_floats_of(word, FIELD: tl.constexpr):
    """Return a field of E2M1, whose exponent and mantissa become those of bfloat16, times 2 ** 126, the ratio of the
    biases."""
    # The field's sign goes to the highest bit of its half.
    raised = (word.to(tl.int32) << (12 - 4 * FIELD)).to(tl.int16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 number, factor;
        mov.b32 factor, 0x7E807E80;
        shr.u32 number, $1, 6;
        and.b32 number, number, 0x01C001C0;
        lop3.b32 number, $1, 0x80008000, number, 0xEA;
        mul.rn.bf16x2 $0, number, factor;
        }""",
        "=r,r",
        [raised],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
