"""Activations, plain and gated (GLU variants, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn import functional as F


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}
"""Name -> function of a tensor, which returns a new one."""


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
