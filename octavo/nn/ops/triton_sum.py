"""Sums of products that were computed in parts, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

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
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add PARTS matrices of `count` numbers, and a bias to each row of N."""
    follow(OVERLAPS)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count.to(tl.int64) + i, mask=i < count, other=0.0).to(tl.float32)
    if BIASED:
        total += tl.load(bias + i % N, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < count)


def sum_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of parts [P, M, N], contiguous, and a bias [N]: [M, N], rounded once to `dtype`."""
    count, rows, outputs = parts.shape
    out = parts.new_empty(rows, outputs, dtype=dtype)
    _sum_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        parts,
        parts if bias is None else bias,
        out,
        out.numel(),
        N=outputs,
        PARTS=count,
        BIASED=bias is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap(parts.device),
    )
    return out
