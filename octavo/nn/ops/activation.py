"""Activations, plain and gated (GLU variants, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


def xielu(x: Tensor, curve: Tensor) -> Tensor:
    """Return xIELU (https://arxiv.org/abs/2411.13010), computed in float32: a parabola for positive numbers, an
    integral of ELU for others.

    Args:
        curve: [4] float32: the factor of x² where x is positive, that of e^x - 1 - x elsewhere, the factor of x
            everywhere, and the largest exponent, which is about 0.
    """
    positive, negative, slope, most = curve
    wide = x.float()
    below = torch.expm1(torch.minimum(wide, most)) - wide
    return torch.where(wide > 0, positive * wide * wide, negative * below).add_(slope * wide).to(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}
"""Name -> function of a tensor, which returns a new one. The name "xielu" has parameters, too (`nn/xielu.py`)."""


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


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) · up; the arguments are those of `silu_mul`, and a name of `ACTIVATIONS`."""
    if activation == "silu":
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
