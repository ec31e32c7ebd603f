"""Root-mean-square normalisation on a GPU: what `norm.py` says, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """The sum replaces x where there is something to add. The norm is taken of the sum as it is stored."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    valid = i < SIZE
    value = tl.load(x + row + i, mask=valid, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + row + i, mask=valid, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(x + row + i, value, mask=valid)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    scaled = wide * inverse * tl.load(weight + i, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row + i, scaled.to(out.dtype.element_ty), mask=valid)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] contiguous."""
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    _launch(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual of one dtype, contiguous."""
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    _launch(x, residual, weight, out, eps, add=True)
    return out, x


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool) -> None:
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    rows = x.numel() // size
    if rows:
        warps = max(1, min(16, block // 512))
        _norm_kernel[(rows,)](x, residual, weight, out, eps, SIZE=size, BLOCK=block, ADD=add, num_warps=warps)
