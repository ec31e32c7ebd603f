"""Gated activations (SwiGLU, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, as a new contiguous tensor.

    Args:
        gate_up: [..., 2I], the gate in the first half of the last dimension.

    Returns:
        [..., I].
    """
    if gate_up.is_cuda and gate_up.is_contiguous():
        from octavo.nn.ops import triton_activation  # needs triton, which machines without a GPU may lack

        return triton_activation.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
