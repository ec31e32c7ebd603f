"""Kernels of the slots: fill them, lay out a batch from them, and append its tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["token_stride", "table_stride"])
def fill_kernel(
    packed,
    headers,
    tokens,
    length,
    computed,
    tables,
    settings,
    token_stride,
    table_stride,
    HEADER: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one BLOCK of a new request's tokens and block table; the first program also counters and parameters.

    A header is: slot, length, computed, offsets of tokens and blocks in `packed`, number of blocks; then the
        parameters.
    """
    header = headers + tl.program_id(0) * HEADER
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(header).to(tl.int64)
    count = tl.load(header + 1)
    first_token = tl.load(header + 3)
    first_block = tl.load(header + 4)
    blocks = tl.load(header + 5)
    token = tl.load(packed + first_token + i, mask=i < count, other=0)
    tl.store(tokens + slot * token_stride + i, token, mask=i < count)
    block = tl.load(packed + first_block + i, mask=i < blocks, other=0)
    tl.store(tables + slot * table_stride + i, block, mask=i < blocks)
    if tl.program_id(1) == 0:
        tl.store(length + slot, count)
        tl.store(computed + slot, tl.load(header + 2))
        p = tl.arange(0, PARAMS)
        tl.store(settings + slot * PARAMS + p, tl.load(header + 6 + p))


@triton.jit(do_not_specialize=["count", "table_stride"])
def extend_kernel(writes, tables, count, table_stride, BLOCK: tl.constexpr):
    """Write block table entries. `writes`: (row, index, block) triples; rows count through all groups' tables."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    slot = tl.load(writes + 3 * i, mask=valid, other=0).to(tl.int64)
    index = tl.load(writes + 3 * i + 1, mask=valid, other=0)
    block = tl.load(writes + 3 * i + 2, mask=valid, other=0)
    tl.store(tables + slot * table_stride + index, block, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_slots", "token_stride", "table_stride"])
def layout_kernel(
    slots,
    query_start,
    row_of_token,
    behind,
    tokens,
    computed,
    tables,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    num_rows,
    num_tokens,
    num_slots,
    token_stride,
    table_stride,
    BRANCHES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the batch's tokens, positions, cells and lengths. Rows of slot `num_slots` are padding: length 0, cell
    -1. With BRANCHES, positions are `behind` [T] places before the tokens' own."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = t < num_tokens
    row = tl.load(row_of_token + t, mask=valid, other=0)
    slot = tl.load(slots + row, mask=valid, other=0).to(tl.int64)
    held = valid & (slot < num_slots)
    offset = t - tl.load(query_start + row, mask=valid, other=0)
    place = tl.where(held, tl.load(computed + slot, mask=held, other=0) + offset, 0)
    token = tl.load(tokens + slot * token_stride + place, mask=held, other=0)
    block = tl.load(tables + slot * table_stride + place // PAGE, mask=held, other=0)
    position = place
    if BRANCHES:
        position = place - tl.load(behind + t, mask=held, other=0)
    tl.store(input_ids + t, token.to(tl.int64), mask=valid)
    tl.store(positions + t, position.to(tl.int64), mask=valid)
    cell = block.to(tl.int64) * PAGE + place % PAGE
    tl.store(slot_mapping + t, tl.where(held, cell, -1), mask=valid)
    is_row = t < num_rows
    row_slot = tl.load(slots + t, mask=is_row, other=0).to(tl.int64)
    row_held = is_row & (row_slot < num_slots)
    count = tl.load(query_start + t + 1, mask=is_row, other=0) - tl.load(query_start + t, mask=is_row, other=0)
    before = tl.load(computed + row_slot, mask=row_held, other=0)
    tl.store(seq_lens + t, tl.where(row_held, before + count, 0), mask=is_row)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "table_stride", "group_stride", "cell_stride"])
def cells_kernel(
    slots,
    row_of_token,
    positions,
    tables,
    slot_mapping,
    num_tokens,
    num_slots,
    table_stride,
    group_stride,
    cell_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `slot_mapping` of a laid-out batch for all cache groups but the first; -1 for padding."""
    group = tl.program_id(1).to(tl.int64) + 1
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = t < num_tokens
    row = tl.load(row_of_token + t, mask=valid, other=0)
    slot = tl.load(slots + row, mask=valid, other=0).to(tl.int64)
    held = valid & (slot < num_slots)
    position = tl.load(positions + t, mask=held, other=0)
    block = tl.load(tables + group * group_stride + slot * table_stride + position // PAGE, mask=held, other=0)
    cell = block.to(tl.int64) * PAGE + position % PAGE
    tl.store(slot_mapping + group * cell_stride + t, tl.where(held, cell, -1), mask=valid)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def advance_kernel(slots, query_start, computed, num_rows, num_slots, BLOCK: tl.constexpr):
    """Add the batch's token counts to `computed`."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = r < num_rows
    slot = tl.load(slots + r, mask=valid, other=0)
    held = valid & (slot < num_slots)
    count = tl.load(query_start + r + 1, mask=held, other=0) - tl.load(query_start + r, mask=held, other=0)
    tl.store(computed + slot, tl.load(computed + slot, mask=held, other=0) + count, mask=held)


@triton.jit(do_not_specialize=["count", "num_slots", "token_stride"])
def append_kernel(slots, sampled, tokens, length, count, num_slots, token_stride, BLOCK: tl.constexpr):
    """Append one sampled token to each slot; token 0 if sampling failed (-1), so that the row stays valid until it
    ends."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = s < count
    slot = tl.load(slots + s, mask=valid, other=0).to(tl.int64)
    held = valid & (slot < num_slots)
    token = tl.maximum(tl.load(sampled + s, mask=held, other=0), 0)
    end = tl.load(length + slot, mask=held, other=0)
    tl.store(tokens + slot * token_stride + end, token, mask=held & (end < token_stride))
    tl.store(length + slot, end + 1, mask=held)
