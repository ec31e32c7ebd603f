"""The gated norm of `gated_norm.py` on a GPU, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import next_power_of_2

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@triton.jit
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    gate_stride,
    eps,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    valid = i < SIZE
    at = part * SIZE + i
    value = tl.load(x + token * (PARTS * SIZE) + at, mask=valid, other=0.0)
    factor = tl.load(gate + token * gate_stride + at, mask=valid, other=0.0).to(tl.float32)
    factor = factor / (1.0 + tl.exp(-factor))
    if GATE_FIRST:
        value *= factor
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    value *= tl.load(weight + (i if SHARED else at), mask=valid, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        value *= factor
    tl.store(out + token * (PARTS * SIZE) + at, value.to(out.dtype.element_ty), mask=valid)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, parts: int, *, gate_first: bool
) -> Tensor:
    """Normalize each of the `parts` of a token's channels; see `GatedNorm.gated`.

    Args:
        x: [T, channels] float32, contiguous.
        gate: [T, channels], tokens at any distance.
        weight: [channels], or that of one part, which all share.
    """
    tokens, channels = x.shape
    size = channels // parts
    out = x.new_empty(tokens, channels, dtype=dtype)
    if tokens:
        _gated_norm_kernel[(tokens, parts)](
            x,
            gate,
            weight,
            out,
            gate.stride(0),
            eps,
            PARTS=parts,
            SIZE=size,
            SHARED=weight.numel() == size and parts > 1,
            GATE_FIRST=gate_first,
            BLOCK=next_power_of_2(size),
        )
    return out
