"""Sums of products that were computed in parts, and their gated activation, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import cdiv
from octavo.nn.ops.triton_overlap import follow, overlap

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _sum_kernel(
    parts,
    bias,
    out,
    count,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add PARTS matrices whose rows have N numbers, and a bias to each row; make `count` numbers of the sums."""
    follow(OVERLAPS)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    if GATED:
        at = i // (N // 2) * N + i % (N // 2)
        gate = _sum(parts, bias, at, valid, 2 * count.to(tl.int64), N, PARTS, BIASED)
        up = _sum(parts, bias, at + N // 2, valid, 2 * count.to(tl.int64), N, PARTS, BIASED)
        total = gate / (1.0 + tl.exp(-gate)) * up
    else:
        total = _sum(parts, bias, i, valid, count.to(tl.int64), N, PARTS, BIASED)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _sum(parts, bias, at, valid, size, N: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr):
    """Return the sum of PARTS matrices of `size` numbers and a bias at some places, in float32."""
    total = tl.zeros(at.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + at, mask=valid, other=0.0).to(tl.float32)
    if BIASED:
        total += tl.load(bias + at % N, mask=valid, other=0.0).to(tl.float32)
    return total


def sum_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """Return y, the sum of parts [P, M, N], contiguous, and a bias [N], rounded once to `dtype`: [M, N].

    If `gated`, return silu(first half) * second half of y: [M, N / 2].
    """
    count, rows, outputs = parts.shape
    out = parts.new_empty(rows, outputs // 2 if gated else outputs, dtype=dtype)
    _sum_kernel[(cdiv(out.numel(), _BLOCK),)](
        parts,
        parts if bias is None else bias,
        out,
        out.numel(),
        N=outputs,
        PARTS=count,
        BIASED=bias is not None,
        GATED=gated,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap(parts.device),
    )
    return out
