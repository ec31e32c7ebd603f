"""Values of narrow floating-point formats, and matrices of them with scales."""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_e2m1(pairs: Tensor) -> Tensor:
    """Return the values of bytes [..., C], each of two numbers of 4 bits, the first in the low half: [..., 2 * C]
    float32 (OCP Microscaling Formats, version 1.0, 5.3.3)."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return table[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).long()]


def from_e8m0(exponents: Tensor) -> Tensor:
    """Return powers of two, of exponents as uint8 with bias 127: float32 (OCP Microscaling Formats, 5.4.1)."""
    return torch.exp2(exponents.float() - 127)


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Return values [N, K] times scales: [] or [1 or N, G], of G equal groups of inputs."""
    values, scales = values.float(), scales.float()
    if scales.dim():
        scales = scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)
    return values.mul_(scales)
