"""Gated activations of `activation.py` on a GPU, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.ops.triton_overlap import follow, overlap

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = i < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + i, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + i, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=valid)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `activation.silu_mul`. gate_up [..., 2I] must be contiguous."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    rows = out.numel() // size
    block = min(2048, next_power_of_2(size))
    if rows:
        _silu_mul_kernel[(rows, cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, **overlap(out.device))
    return out
