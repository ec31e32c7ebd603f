"""Merge the parts of rows that a plan divided by their lengths (`nn/attention/triton_plan.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.attention.triton_decode import merged
from octavo.nn.ops.triton_overlap import follow


@triton.jit
def merge_planned_kernel(
    part_out,
    part_lse,
    out,
    plan,
    rows,
    query_start,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Merge all parts of a row for GROUP heads, in the program of the row's first slot."""
    follow(OVERLAPS)
    slot = plan + 4 * tl.program_id(1)
    item, part, parts = tl.load(slot), tl.load(slot + 1), tl.load(slot + 2)
    if (item < 0) | (part > 0) | (parts == 1):
        return
    row = item
    if HAS_ROWS:
        row = tl.load(rows + item)
    token = tl.load(query_start + row).to(tl.int64)
    head = tl.program_id(0) * GROUP
    first = tl.load(slot + 3).to(tl.int64) * HEADS + head
    mixed = merged(part_out, part_lse, first, HEADS, parts, GROUP, GROUP, D, BLOCK_D, MERGED)
    g, channel = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    target = out + (token * HEADS + head + g)[:, None] * D + channel[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=(channel < D)[None, :])
