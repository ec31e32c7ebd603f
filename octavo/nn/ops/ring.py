"""What the CUDA kernels of one row have in common, `cuda/row.cuh`: blocks that stay on their multiprocessors and copy a
matrix into a ring in shared memory, far ahead of what they multiply, and the first of it while the previous launch
ends."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

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


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
