"""Products with a matrix of small numbers on a GPU, which are widened in registers; launched by `words.py`.

The matrix [N, K] is stored as words [N, blocks, WIDTH] of 16 bits. A word has 4 fields of 4 bits or 2 of 8 bits, and a
block has WIDTH inputs for each field: word j holds its inputs WIDTH * i + j for all i, from the lowest bits on. So
field i of a block's words is WIDTH adjacent inputs, which share a scale, and is moved like a tile of 16-bit numbers.

value = scale * number + minimum, with a scale and perhaps a minimum for each group of inputs. KIND says how a field
becomes a number: "integers", less the middle of their range; "table", a place in a `book` of 16 numbers; "planes", the
same with the book of `planes_of`; "e4m3" or "e5m2", a float of 8 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow


@triton.jit
def numbers_of_words(word, book, FIELD: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers of a field of words of 16 bits, in float32."""
    if KIND == "integers":
        return integers_of(word, FIELD, BITS)
    elif KIND == "table":
        return tl.load(book + ((word.to(tl.int32) >> (FIELD * BITS)) & 15), eviction_policy="evict_last").to(tl.float32)
    else:
        return floats_of(word, FIELD, 4 if KIND == "e4m3" else 5)


@triton.jit
def narrow_numbers_of_words(
    word, book, FIELD: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr, FAST: tl.constexpr
):
    """Return the numbers of a field of words as NARROW, which may round those of a table.

    FAST: by few instructions for integers in bfloat16, of compute capability 9.0.
    """
    if FAST and KIND == "integers" and BITS == 4 and tl.bfloat16 == NARROW:
        return small_integers_of(word, FIELD)
    elif KIND == "planes":
        return selected(word, book, FIELD, NARROW)
    else:
        return numbers_of_words(word, book, FIELD, BITS, KIND).to(NARROW)


@triton.jit
def floats_of(word, FIELD: tl.constexpr, EXPONENT: tl.constexpr):
    """Return a field of 8-bit floats with EXPONENT bits of exponent, which are finite, as float32.

    By integer operations, since Triton converts E4M3 only on GPUs that have instructions for it.
    """
    SHIFT: tl.constexpr = 8 - EXPONENT
    MASK: tl.constexpr = (127 << (24 - SHIFT)) - (1 << 31)
    # Sign, exponent and mantissa go to their places in float32, whose exponents have a larger bias.
    placed = ((word.to(tl.int32) << (24 - 8 * FIELD)) >> SHIFT) & MASK
    return placed.to(tl.float32, bitcast=True) * (2.0 ** (128 - (1 << (EXPONENT - 1))))


@triton.jit
def planes_of(book):
    """Return the bytes of 16 numbers of 16 bits, in registers: the low ones of the first and the last eight numbers,
    and the high ones."""
    return tl.load(book), tl.load(book + 1), tl.load(book + 2), tl.load(book + 3)


_PLANES = tl.constexpr("=r,=r,r,r" + ",r" * 12 + ",l" * 16)
"""Registers of `selected`: two of results and of words; of the other arguments, one for each of four elements."""


@triton.jit
def selected(word, planes, FIELD: tl.constexpr, NARROW: tl.constexpr):
    """Return the numbers of a field of 4 bits, four words at a time, in 14 instructions.

    Permutations select bytes of a table that stays in registers. With loads from a table Triton would no longer copy
    words ahead of the product.
    """
    # The bytes that have the fields, such that one shift brings these into the order of the words.
    PICK: tl.constexpr = (0x6240, 0x4062, 0x7351, 0x5173)[FIELD]
    SHIFT: tl.constexpr = 20 if FIELD % 2 else 12
    UNMOVED: tl.constexpr = 0xF0F0 if FIELD % 2 else 0x0F0F
    bits = tl.inline_asm_elementwise(
        """{
        .reg .b32 code, moved, place, half, low, high, first, second;
        prmt.b32 code, $2, $3, $4;
        shr.u32 moved, code, $8;
        lop3.b32 code, $12, code, moved, 0xCA;
        and.b32 place, code, 0x7777;
        shr.u32 half, code, 1;
        lop3.b32 half, half, 0x4444, 0x3210, 0xEA;
        mov.b64 {first, second}, $16;
        prmt.b32 low, first, second, place;
        mov.b64 {first, second}, $20;
        prmt.b32 high, first, second, place;
        prmt.b32 low, low, high, half;
        mov.b64 {first, second}, $24;
        prmt.b32 high, first, second, place;
        mov.b64 {first, second}, $28;
        prmt.b32 first, first, second, place;
        prmt.b32 high, high, first, half;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
        }""",
        _PLANES,
        [word, PICK, SHIFT, UNMOVED, planes[0], planes[1], planes[2], planes[3]],
        dtype=tl.int16,
        is_pure=True,
        pack=4,
    )
    return bits.to(NARROW, bitcast=True)


@triton.jit
def integers_of(word, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Return a field of words of 16 bits, less the middle of the integers' range, as float32."""
    field = (word.to(tl.int32) >> (FIELD * BITS)) & ((1 << BITS) - 1)
    return (field | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))


@triton.jit
def small_integers_of(word, FIELD: tl.constexpr):
    """Return a field of 4 bits, less 8, as bfloat16: as the low bits of the mantissa of 128, two words at a time."""
    if FIELD == 0:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            lop3.b32 a, $1, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 b, 0xC308C308;
            add.rn.bf16x2 $0, a, b;
            }""",
            "=r,r",
            [word],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif FIELD == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shr.u32 a, $1, 4;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 b, 0xC308C308;
            add.rn.bf16x2 $0, a, b;
            }""",
            "=r,r",
            [word],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif FIELD == 2:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shr.u32 a, $1, 8;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 b, 0xC308C308;
            add.rn.bf16x2 $0, a, b;
            }""",
            "=r,r",
            [word],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shr.u32 a, $1, 12;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 b, 0xC308C308;
            add.rn.bf16x2 $0, a, b;
            }""",
            "=r,r",
            [word],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _weights(
    word,
    place,
    valid,
    scales,
    minima,
    book,
    FIELD: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    MINIMA: tl.constexpr,
):
    """Return a field of words as the matrix's values, in float32."""
    scale = tl.load(scales + place, mask=valid, other=0.0).to(tl.float32)
    value = numbers_of_words(word, book, FIELD, BITS, KIND) * scale[:, None]
    if MINIMA:
        value += tl.load(minima + place, mask=valid, other=0.0).to(tl.float32)[:, None]
    return value


@triton.jit(do_not_specialize=["M"])
def words_rows_kernel(
    x,
    words,
    scales,
    minima,
    book,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS_OF_K: tl.constexpr,
    MINIMA: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply rows by some rows of the matrix, the left operand of the matrix units. Each of PARTS_OF_K programs takes
    a part of the inputs and stores its product in its own part of `out` [PARTS_OF_K, M, N].

    SCALED: values are scaled and rounded to the dtype of x before they are multiplied; otherwise sums of each group are
    scaled. Matrices with minima need it; those of "planes" can't have it.
    """
    FIELDS: tl.constexpr = 16 // BITS
    SIZE: tl.constexpr = FIELDS * WIDTH
    BLOCKS: tl.constexpr = (K + SIZE - 1) // SIZE
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    PARTS: tl.constexpr = SIZE // GROUP if GROUP < SIZE else 1
    OF_PART: tl.constexpr = FIELDS // PARTS
    SHARE: tl.constexpr = (BLOCKS + PARTS_OF_K - 1) // PARTS_OF_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, WIDTH)
    own = tl.minimum(n, N - 1)
    start = words + own.to(tl.int64)[:, None] * (BLOCKS * WIDTH) + j[None, :]
    row = x + m.to(tl.int64)[None, :] * K + j[:, None]
    m_valid = (m < M)[None, :]
    numbers = planes_of(book) if KIND == "planes" else book
    follow(OVERLAPS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = tl.program_id(1) * SHARE
    for block in range(first, tl.minimum(first + SHARE, BLOCKS)):
        word = tl.load(start + block * WIDTH, eviction_policy="evict_first")
        for part in tl.static_range(PARTS):
            group = block * SIZE // GROUP + part
            if SCALED:
                for i in tl.static_range(OF_PART):
                    k = block * SIZE + (part * OF_PART + i) * WIDTH
                    if K % SIZE == 0:
                        value = tl.load(row + k, mask=m_valid, other=0.0)
                    else:
                        value = tl.load(row + k, mask=m_valid & (k + j < K)[:, None], other=0.0)
                    weight = _weights(
                        word,
                        own * GROUPS + group,
                        group < GROUPS,
                        scales,
                        minima,
                        numbers,
                        part * OF_PART + i,
                        BITS,
                        KIND,
                        MINIMA,
                    )
                    acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
            else:
                scale = tl.load(scales + own * GROUPS + group, mask=group < GROUPS, other=0.0).to(tl.float32)
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for i in tl.static_range(OF_PART):
                    k = block * SIZE + (part * OF_PART + i) * WIDTH
                    if K % SIZE == 0:
                        value = tl.load(row + k, mask=m_valid, other=0.0)
                    else:
                        value = tl.load(row + k, mask=m_valid & (k + j < K)[:, None], other=0.0)
                    weight = narrow_numbers_of_words(
                        word, numbers, part * OF_PART + i, BITS, KIND, value.dtype, OVERLAPS
                    )
                    sums = tl.dot(weight, value, sums, input_precision="ieee")
                acc += sums * scale[:, None]
    valid = (n < N)[:, None] & m_valid
    place = out + (tl.program_id(1).to(tl.int64) * M + m.to(tl.int64)[None, :]) * N + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=valid)


@triton.jit
def widen_kernel(
    words,
    scales,
    minima,
    book,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MINIMA: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the values of some rows of the matrix to out [N, K]."""
    FIELDS: tl.constexpr = 16 // BITS
    SIZE: tl.constexpr = FIELDS * WIDTH
    BLOCKS: tl.constexpr = (K + SIZE - 1) // SIZE
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    j = tl.arange(0, WIDTH)
    place = at[:, None] * WIDTH + j[None, :]
    valid = (n < N)[:, None, None] & (at < BLOCKS)[None, :, None]
    start = n.to(tl.int64)[:, None, None]
    word = tl.load(words + start * (BLOCKS * WIDTH) + place[None, :, :], mask=valid, other=0)
    follow(OVERLAPS)
    for field in tl.static_range(FIELDS):
        group = (at * SIZE + field * WIDTH) // GROUP
        inside = (n < N)[:, None] & (group < GROUPS)[None, :]
        own = n[:, None] * GROUPS + group[None, :]
        value = numbers_of_words(word, book, field, BITS, KIND)
        value *= tl.load(scales + own, mask=inside, other=0.0).to(tl.float32)[:, :, None]
        if MINIMA:
            value += tl.load(minima + own, mask=inside, other=0.0).to(tl.float32)[:, :, None]
        k = at[:, None] * SIZE + field * WIDTH + j[None, :]
        target = out + start * K + k[None, :, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=valid & (k < K)[None, :, :])
