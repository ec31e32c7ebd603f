"""Kernels of the products of packed experts, widened in registers; launched by `packed_experts.py`.

The matrices of an expert are stored as codes (`triton_packed_numbers.py`) in rows of C codes each. A code has FIELDS
fields, and a block of WORDS adjacent codes has WORDS inputs for each field, from the lowest field on: for codes of 8
bits, which have one field, inputs are in order.

value = scale * number + minimum, with scales and perhaps minima [experts, groups, outputs] for each GROUP of inputs.
KIND says how a field becomes a number, perhaps by a `book` that all experts share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_expert_rows import store_row
from octavo.nn.ops.triton_experts import rows_tile, store_tile, weight_tile
from octavo.nn.ops.triton_overlap import follow, lead
from octavo.nn.ops.triton_packed_numbers import narrow_numbers_of, numbers_of
from octavo.nn.ops.triton_words import planes_of


@triton.jit(do_not_specialize=["num_tiles", "x_stride"])
def packed_grouped_kernel(
    x,
    x_scales,
    x_stride,
    w,
    scales,
    minima,
    book,
    bias,
    weights,
    order,
    tiles,
    out,
    num_tiles,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    MINIMA: tl.constexpr,
    ROUNDED: tl.constexpr,
    INTEGERS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TURNED: tl.constexpr,
    COPIES: tl.constexpr,
    COPIES_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply as `grouped_kernel` of `triton_experts.py`, by packed matrices.

    ROUNDED: x is of 8 bits, too, with a scale for each row, or for each of its groups, [groups, x_stride]; then the
    matrix units multiply codes: INTEGERS, which have a scale for each output, or E4M3. Otherwise TURNED is needed.

    Args:
        DEPTH: codes of a pass; those of a block if there are several fields, and within a group.
    """
    numbers = planes_of(book) if KIND == "planes" else book
    follow(OVERLAPS)
    PARTS: tl.constexpr = 2 if GATED else 1
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    WHOLE: tl.constexpr = GROUPS == 1 and not MINIMA
    END: tl.constexpr = (C + DEPTH - 1) // DEPTH * DEPTH * FIELDS  # of inputs, with those that fill the last block
    IN_GROUP: tl.constexpr = FIELDS if GROUPS == 1 or GROUP >= FIELDS * DEPTH else GROUP // DEPTH
    columns = tl.cdiv(N, WIDTH)
    beside = tl.program_id(0) // (SIDE_BY_SIDE * columns) * SIDE_BY_SIDE
    index = tl.program_id(0) % (SIDE_BY_SIDE * columns)
    tile = beside + index % SIDE_BY_SIDE
    n = index // SIDE_BY_SIDE * WIDTH
    if tile >= num_tiles:
        return
    expert, start = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    rows = tl.load(tiles + 3 * tile + 2)
    if rows == 0:
        return
    position = start + tl.minimum(tl.arange(0, HEIGHT), rows - 1)
    choice = tl.load(order + position)
    row = choice // TOP_K if FIRST else position
    i = tl.arange(0, PARTS * WIDTH)
    own = i // WIDTH * N + tl.minimum(n + i % WIDTH, N - 1)
    base = expert.to(tl.int64) * (GROUPS * PARTS * N)
    shape: tl.constexpr = [PARTS * WIDTH, HEIGHT] if TURNED else [HEIGHT, PARTS * WIDTH]
    acc = tl.zeros(shape, tl.int32 if INTEGERS else tl.float32)
    for k in range(0, C, DEPTH):
        code = weight_tile(w, expert, n, k, N, C, PARTS, WIDTH, DEPTH, COPIES)
        if ROUNDED:
            value = rows_tile(x, row, start, k, K, END, DEPTH, COPIES_ROWS)
            if WHOLE:
                acc = _product(code, value, acc, TURNED)
            else:
                group = k // GROUP
                scale = tl.load(scales + base + group * (PARTS * N) + own).to(tl.float32)
                row_scale = tl.load(x_scales + group * x_stride + row)
                sums = _product(code, value, tl.zeros(shape, tl.float32), TURNED)
                acc += sums * _outer(scale, row_scale, TURNED)
        elif WHOLE:
            for field in tl.static_range(FIELDS):
                value = rows_tile(x, row, start, k * FIELDS + field * DEPTH, K, END, DEPTH, COPIES_ROWS)
                matrix = narrow_numbers_of(code, numbers, field, KIND, value.dtype, OVERLAPS)
                acc = tl.dot(matrix, value.T, acc, input_precision="ieee")
        else:
            for part in tl.static_range(FIELDS // IN_GROUP):
                group = tl.minimum((k * FIELDS + part * IN_GROUP * DEPTH) // GROUP, GROUPS - 1)
                place = base + group * (PARTS * N) + own
                scale = tl.load(scales + place).to(tl.float32)
                low = tl.load(minima + place).to(tl.float32) if MINIMA else scale
                sums = tl.zeros(shape, tl.float32)
                for field in tl.static_range(part * IN_GROUP, (part + 1) * IN_GROUP):
                    value = rows_tile(x, row, start, k * FIELDS + field * DEPTH, K, END, DEPTH, COPIES_ROWS)
                    if MINIMA:
                        wide = numbers_of(code, numbers, field, KIND) * scale[:, None] + low[:, None]
                        acc = tl.dot(wide.to(value.dtype), value.T, acc, input_precision="ieee")
                    else:
                        matrix = narrow_numbers_of(code, numbers, field, KIND, value.dtype, OVERLAPS)
                        sums = tl.dot(matrix, value.T, sums, input_precision="ieee")
                if not MINIMA:
                    acc += sums * scale[:, None]
    total = acc.to(tl.float32)
    if WHOLE:
        factor = tl.load(scales + base + own).to(tl.float32)
        if ROUNDED:
            total *= _outer(factor, tl.load(x_scales + row), TURNED)
        else:
            total *= factor[:, None]
    if TURNED:
        total = total.T
    store_tile(
        total,
        bias,
        weights,
        out,
        alpha,
        limit,
        expert,
        choice,
        start,
        rows,
        n,
        N,
        HEIGHT,
        WIDTH,
        FIRST,
        GATED,
        ACTIVATION,
        BIASED,
        WEIGHTED,
    )


@triton.jit
def _product(code, value, acc, TURNED: tl.constexpr):
    """Return acc plus the product of two tiles of 8-bit numbers."""
    if TURNED:
        return tl.dot(code, value.T, acc, out_dtype=acc.dtype)
    else:
        return tl.dot(value, code.T, acc, out_dtype=acc.dtype)


@triton.jit
def _outer(scale, row_scale, TURNED: tl.constexpr):
    """Return the factors of a tile, of the scales of its outputs and of its rows."""
    if TURNED:
        return scale[:, None] * row_scale[None, :]
    else:
        return row_scale[:, None] * scale[None, :]


@triton.jit
def _add_codes(
    acc,
    codes,
    scales,
    minima,
    book,
    x,
    norm,
    block,
    valid,
    STRIDE: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    MINIMA: tl.constexpr,
    WHOLE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Add the products of a row x and blocks of matrix rows, [rows, blocks, WORDS], to acc.

    Args:
        codes: the addresses of these blocks.
        scales, minima: the addresses of the rows' factors of the first group, [rows]; STRIDE to the next group's.
        book: in registers if numbers are looked up in planes.
        valid: [rows, blocks], what is read.
    """
    code = tl.load(codes, mask=valid[:, :, None], other=0.0, eviction_policy="evict_first")
    j = tl.arange(0, WORDS)
    for field in tl.static_range(FIELDS):
        at = (block * FIELDS + field) * WORDS
        k = at[:, None] + j[None, :]
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if NORMED:
            value *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        number = numbers_of(code, book, field, KIND)
        if WHOLE:
            acc += number * value[None, :, :]
        else:
            place = (at // GROUP * STRIDE)[None, :]
            inside = valid & (at < K)[None, :]
            scale = tl.load(scales[:, None] + place, mask=inside, other=0.0).to(tl.float32)
            wide = number * scale[:, :, None]
            if MINIMA:
                wide += tl.load(minima[:, None] + place, mask=inside, other=0.0).to(tl.float32)[:, :, None]
            acc += wide * value[None, :, :]
    return acc


@triton.jit(do_not_specialize=["begin"])
def packed_gate_up_row_kernel(
    x,
    norm,
    w,
    scales,
    minima,
    book,
    bias,
    weights,
    experts,
    out,
    begin,
    eps,
    alpha,
    limit,
    OWNED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    MINIMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute as `gate_up_row_kernel` of `triton_expert_rows.py`, in passes of BLOCKS blocks of packed matrices."""
    PARTS: tl.constexpr = 2 if GATED else 1
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    WHOLE: tl.constexpr = GROUPS == 1 and not MINIMA
    STRIDE: tl.constexpr = PARTS * N
    numbers = planes_of(book) if KIND == "planes" else book
    lead(OVERLAPS)  # launches that follow may read `experts` without waiting
    choice = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + choice) - begin
    if (expert < 0) | (expert >= OWNED):
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(n, N - 1)
    start = w + (expert.to(tl.int64) * STRIDE + own)[:, None, None] * C
    factors = expert.to(tl.int64) * (GROUPS * STRIDE) + own
    row = x + choice // TOP_K * K
    j = tl.arange(0, WORDS)
    acc = tl.zeros([BLOCK_N, BLOCKS, WORDS], tl.float32)
    gated = tl.zeros([BLOCK_N, BLOCKS, WORDS], tl.float32)
    square = tl.zeros([BLOCKS, WORDS], tl.float32)
    for first in range(0, C // WORDS, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        valid = (n < N)[:, None] & (block < C // WORDS)[None, :]
        codes = start + (block[:, None] * WORDS + j[None, :])[None, :, :]
        acc = _add_codes(
            acc,
            codes,
            scales + factors,
            minima + factors,
            numbers,
            row,
            norm,
            block,
            valid,
            STRIDE,
            K,
            WORDS,
            FIELDS,
            GROUP,
            KIND,
            MINIMA,
            WHOLE,
            NORMED,
        )
        if GATED:
            gated = _add_codes(
                gated,
                codes + N * C,
                scales + factors + N,
                minima + factors + N,
                numbers,
                row,
                norm,
                block,
                valid,
                STRIDE,
                K,
                WORDS,
                FIELDS,
                GROUP,
                KIND,
                MINIMA,
                WHOLE,
                NORMED,
            )
        if NORMED:
            for field in tl.static_range(FIELDS):
                k = ((block * FIELDS + field) * WORDS)[:, None] + j[None, :]
                value = tl.load(row + k, mask=k < K, other=0.0).to(tl.float32)
                square += value * value
    total = tl.sum(tl.sum(acc, 2), 1)
    up = tl.sum(tl.sum(gated, 2), 1)
    if WHOLE:
        total *= tl.load(scales + factors).to(tl.float32)
        if GATED:
            up *= tl.load(scales + factors + N).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / K + eps)
        total *= inverse
        up *= inverse
    store_row(total, up, bias, weights, out, alpha, limit, choice, expert, n, N, GATED, ACTIVATION, BIASED, WEIGHTED)


@triton.jit(do_not_specialize=["begin"])
def packed_down_row_kernel(
    x,
    w,
    scales,
    minima,
    book,
    bias,
    weights,
    experts,
    added,
    out,
    begin,
    OWNED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    MINIMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute as `down_row_kernel` of `triton_expert_rows.py`, in passes of BLOCKS blocks of packed matrices."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    numbers = planes_of(book) if KIND == "planes" else book
    follow(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own, inside = tl.minimum(n, N - 1), n < N
    j = tl.arange(0, WORDS)
    acc = tl.zeros([BLOCK_N, BLOCKS, WORDS], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    # Unrolled, and added up only after the last expert, so that many loads are under way at once.
    for slot in tl.static_range(TOP_K):
        choice = token * TOP_K + slot
        expert = tl.load(experts + choice) - begin
        mine = (expert >= 0) & (expert < OWNED)
        expert = tl.where(mine, expert, 0).to(tl.int64)
        weight = tl.load(weights + choice) if WEIGHTED else 1.0
        factors = expert * (GROUPS * N) + own
        one = tl.zeros([BLOCK_N, BLOCKS, WORDS], tl.float32)
        for first in tl.static_range(0, C // WORDS, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            valid = (inside & mine)[:, None] & (block < C // WORDS)[None, :]
            place = (block[:, None] * WORDS + j[None, :])[None, :, :]
            one = _add_codes(
                one,
                w + (expert * N + own)[:, None, None] * C + place,
                scales + factors,
                minima + factors,
                numbers,
                x + choice * K,
                x,
                block,
                valid,
                N,
                K,
                WORDS,
                FIELDS,
                GROUP,
                KIND,
                MINIMA,
                GROUPS == 1 and not MINIMA,
                False,
            )
        factor = tl.zeros([BLOCK_N], tl.float32) + weight
        if GROUPS == 1 and not MINIMA:
            factor *= tl.load(scales + factors).to(tl.float32)
        # What ranks without this expert read of x has not been written, and may be no number.
        acc += tl.where(mine, one * factor[:, None, None], 0.0)
        if BIASED:
            biases += tl.load(bias + expert * N + n, mask=inside & mine, other=0.0).to(tl.float32) * weight
    total = tl.sum(tl.sum(acc, 2), 1) + biases
    if ADDED:
        total += tl.load(added + token * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=inside)
