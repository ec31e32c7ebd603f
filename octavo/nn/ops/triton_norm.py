"""Root-mean-square normalization of `norm.py` on a GPU, one program per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import next_power_of_2
from octavo.nn.ops.triton_overlap import follow, overlap

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MANY = 256
"""Rows from which on more warps are faster for sums of parts."""
_PER_WARP = 512
"""Numbers of a row for each warp, but for those sums."""


@triton.jit
def _norm_kernel(
    x,
    residual,
    total,
    weight,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Normalize x; or the residual plus the PARTS of x, each [rows, SIZE], as that sum is stored."""
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    valid = i < SIZE
    scale = tl.load(weight + i, mask=valid, other=0.0)  # first, since no load moves to before a store
    if PARTS == 0:
        value = tl.load(x + row + i, mask=valid, other=0.0)
    else:
        wanted = tl.load(residual + row + i, mask=valid, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            place = x + part * tl.num_programs(0).to(tl.int64) * SIZE + row + i
            wanted += tl.load(place, mask=valid, other=0.0).to(tl.float32)
        value = wanted.to(total.dtype.element_ty)
        tl.store(total + row + i, value, mask=valid)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    scaled = wide * inverse * scale.to(tl.float32)
    tl.store(out + row + i, scaled.to(out.dtype.element_ty), mask=valid)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """See `norm.rms_norm`. x [..., H] must be contiguous."""
    return _launch(x, x, x, weight, eps, dtype, parts=0)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """See `norm.add_rms_norm`. x and residual must be contiguous; the sum overwrites x if they have one dtype."""
    total = x if x.dtype == residual.dtype else residual.new_empty(residual.shape)
    return _launch(x, residual, total, weight, eps, dtype, parts=1), total


def sum_rms_norm(parts: Tensor, stream: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """See `norm.sum_rms_norm`. parts [P, T, H] and stream [T, H] must be contiguous; the sum overwrites the stream."""
    return _launch(parts, stream, stream, weight, eps, dtype, parts=parts.shape[0])


def _launch(
    x: Tensor,
    residual: Tensor,
    total: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None,
    *,
    parts: int,
) -> Tensor:
    out = weight.new_empty(total.shape, dtype=dtype)
    size = total.shape[-1]
    block = next_power_of_2(size)
    rows = total.numel() // size
    if rows:
        warps = max(1, min(16, block // (256 if parts > 1 and rows >= _MANY else _PER_WARP)))
        options = overlap(x.device)
        _norm_kernel[(rows,)](
            x, residual, total, weight, out, eps, SIZE=size, BLOCK=block, PARTS=parts, num_warps=warps, **options
        )
    return out
