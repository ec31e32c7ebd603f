"""A matrix product whose sums have one order for any number of rows: one accumulator over the inputs, from the first to
the last, in the steps of the matrix units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import cdiv

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OUTPUTS, _INPUTS = 128, 64


@triton.jit
def _ordered_kernel(
    x,
    weight,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_place = x + m.to(tl.int64)[:, None] * K
    weight_place = weight + n.to(tl.int64)[None, :] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x_tile = tl.load(x_place + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
        weight_tile = tl.load(weight_place + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(x_tile, weight_tile, acc)
    place = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def ordered_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T, rounded once to `dtype`; contiguous tensors of one 16-bit dtype."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = weight.new_empty(rows, outputs, dtype=dtype)
    if rows:
        height = 16 if rows <= 16 else 64 if rows <= 256 else 128
        _ordered_kernel[(cdiv(outputs, _OUTPUTS), cdiv(rows, height))](
            x,
            weight,
            out,
            rows,
            N=outputs,
            K=inputs,
            BLOCK_M=height,
            BLOCK_N=_OUTPUTS,
            BLOCK_K=_INPUTS,
            num_warps=8 if height == 128 else 4,
            num_stages=3,
        )
    return out
