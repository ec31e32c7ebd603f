"""The kernel of the gated product of a feed-forward layer on a Hopper GPU; launched by `gating.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow


@triton.jit
def gate_halves(both, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return silu(first half) * second half: [ROWS, 2 COLUMNS] to [ROWS, COLUMNS]."""
    gate, up = tl.split(tl.permute(tl.reshape(both, [ROWS, 2, COLUMNS]), (0, 2, 1)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["M", "wide", "slim"])
def gated_kernel(
    x_tiles,
    wide_tiles,
    half_tiles,
    quarter_tiles,
    out,
    M,
    wide,
    slim,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute columns [0, WIDE * wide) in wide tiles, and the rest in `slim` tiles of WIDE / 2 + WIDE / 4.

    The matrix is given as [2, N, K] in tiles [2, WIDE, WIDE / 2 or WIDE / 4, DEPTH]. A program keeps its rows.
    """
    follow(OVERLAPS)
    HALF: tl.constexpr = WIDE // 2
    QUARTER: tl.constexpr = WIDE // 4
    row_tiles = tl.cdiv(M, ROWS)
    side_by_side = tl.num_programs(0) // row_tiles
    first = tl.program_id(0) // row_tiles
    m = tl.program_id(0) % row_tiles * ROWS
    rows = m + tl.arange(0, ROWS)
    target = out + rows.to(tl.int64)[:, None] * N
    kind = out.dtype.element_ty
    for tile in range(first, wide, side_by_side):
        n = tile * WIDE
        acc = tl.zeros([ROWS, 2 * WIDE], tl.float32)
        for k in range(0, K, DEPTH):
            x = x_tiles.load([m, k])
            w = wide_tiles.load([0, n, k]).reshape(2 * WIDE, DEPTH)
            acc = tl.dot(x, w.T, acc)
        column = n + tl.arange(0, WIDE)[None, :]
        tl.store(target + column, gate_halves(acc, ROWS, WIDE).to(kind), mask=(rows < M)[:, None] & (column < N))
    for tile in range(first, slim, side_by_side):
        n = wide * WIDE + tile * (HALF + QUARTER)
        half = tl.zeros([ROWS, 2 * HALF], tl.float32)
        quarter = tl.zeros([ROWS, 2 * QUARTER], tl.float32)
        for k in range(0, K, DEPTH):
            x = x_tiles.load([m, k])
            w = half_tiles.load([0, n, k]).reshape(2 * HALF, DEPTH)
            v = quarter_tiles.load([0, n + HALF, k]).reshape(2 * QUARTER, DEPTH)
            half = tl.dot(x, w.T, half)
            quarter = tl.dot(x, v.T, quarter)
        column = n + tl.arange(0, HALF)[None, :]
        tl.store(target + column, gate_halves(half, ROWS, HALF).to(kind), mask=(rows < M)[:, None] & (column < N))
        column = n + HALF + tl.arange(0, QUARTER)[None, :]
        tl.store(target + column, gate_halves(quarter, ROWS, QUARTER).to(kind), mask=(rows < M)[:, None] & (column < N))
