"""Values of narrow floating-point formats."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.load.quantized.codes import halves
from octavo.nn.weights import E2M1


def from_e2m1(pairs: Tensor) -> Tensor:
    """Return the values of bytes [..., C], each of two numbers of 4 bits, the first in the low half: [..., 2 * C]
    float32 (OCP Microscaling Formats, version 1.0, 5.3.3)."""
    return E2M1.of(halves(pairs))


def from_e8m0(exponents: Tensor) -> Tensor:
    """Return powers of two, of exponents as uint8 with bias 127: float32 (OCP Microscaling Formats, 5.4.1)."""
    return torch.exp2(exponents.float() - 127)
