"""What the CUDA kernels of one row and of few rows have in common, `cuda/row.cuh`: blocks that stay on their
multiprocessors and copy a matrix into a ring in shared memory, far ahead of what they multiply, and the first of it
while the previous launch ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

STRIP = 16
"""Outputs that a block computes at a time."""
SHARED = 204 << 10
"""Bytes of shared memory for the row and the ring of one block for each multiprocessor. The rest is for launches that
begin early."""
HALF_SHARED = 107 << 10
"""The same, of two blocks."""
LEAST_DEPTH = 2
"""Spans of a ring, even if it becomes larger than planned."""
MOST_INPUTS = 20480
WARPS = 16
"""Of a block."""
COLUMNS = (4, 8)
"""Rows that kernels for several rows have room for; the matrix units have 8 columns."""
MOST_ROWS = COLUMNS[-1]
PARTS = (1, 2, 4)
"""Launches in which several rows may be multiplied, each some of the inputs, so that they fit in shared memory."""
_LEAST_DEPTHS = {4: 4, 2: 4, 1: LEAST_DEPTH}
"""Steps of a span -> spans in the ring beside several rows, at least: larger ones need more of them."""


class RowForm(NamedTuple):
    """What is fused with the product of one row or, without a norm and for a narrow x, of up to `rows`: macros of the
    kernels."""

    gated: bool
    normed: bool
    biased: bool
    added: bool
    x_float: bool
    out_float: bool
    rows: int = 1

    @property
    def sides(self) -> int:
        """Strips that a block computes together."""
        return 2 if self.gated else 1

    @property
    def sum_bytes(self) -> int:
        """Bytes of the warps' sums of two strips."""
        return 2 * WARPS * self.rows * STRIP * self.sides * 4

    def macros(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in self._asdict().items()}


class RingPlan(NamedTuple):
    """How a block copies a matrix.

    Attributes:
        span: steps of 64 bytes of an output, or of 64 integers, that a warp copies at a time.
        shared: bytes of shared memory, for x and for as many spans of all warps as fit.
    """

    warps: int
    span: int
    shared: int


def blocks_of(outputs: int, device: torch.device) -> int:
    """Return the blocks of a launch that has `outputs`."""
    return min(outputs // STRIP, multiprocessors(device))


def columns_for(rows: int) -> int:
    """Return for how many rows a kernel is compiled that multiplies this number of them."""
    return next(columns for columns in COLUMNS if rows <= columns)


def rows_alone(rows: int, *, gated: bool) -> RowForm:
    """Return the form of a product of several rows that is not added to anything."""
    columns = columns_for(rows)
    return RowForm(gated, normed=False, biased=False, added=False, x_float=False, out_float=False, rows=columns)


def form_of_part(
    part: int, rows: int, out: Tensor, bias: Tensor | None, add_to: Tensor | None, *, gated: bool
) -> RowForm:
    """Return the form of one launch for a part of the inputs of several rows: the first one adds the bias, later ones
    add to its result."""
    return rows_alone(rows, gated=gated)._replace(
        biased=bias is not None and part == 0,
        added=add_to is not None or part > 0,
        out_float=out.dtype == torch.float32,
    )


def beside_rows(room: int, span_bytes: Callable[[int], int], longest: int = 2) -> RingPlan | None:
    """Return how a block copies a matrix, if several rows leave `room` in shared memory; None if that is too little.

    Args:
        span_bytes: steps of a span -> bytes of all warps' spans.
        longest: most steps of a span.
    """
    for span, depth in _LEAST_DEPTHS.items():
        if span <= longest and room >= depth * span_bytes(span):
            return RingPlan(WARPS, span, SHARED)
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return their number; for Triton's interpreter a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
