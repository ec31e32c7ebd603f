"""RMSNorm with a gate, behind recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.norm import RMSNorm


class GatedNorm(RMSNorm):
    """RMSNorm over groups of channels, and a SiLU gate before or after it.

    The statistics and the product are float32; the result has the norm's dtype.
    """

    def __init__(
        self,
        path: str,
        device: torch.device,
        dtype: torch.dtype,
        size: int,
        eps: float,
        *,
        groups: int,
        gate_first: bool,
    ) -> None:
        """
        Args:
            groups: parts of the channels that are normalized separately, each with its part of the weight.
            gate_first: norm(x * silu(gate)) instead of norm(x) * silu(gate).
        """
        super().__init__(path, device, dtype, size, eps)
        self.groups, self.gate_first = groups, gate_first

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm of x [..., size] float32, by a gate of the same shape."""
        gate = F.silu(gate.float())
        if self.gate_first:
            x = x * gate
        parts = x.unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(parts, (parts.shape[-1],), eps=self.eps).flatten(-2) * self.weight.float()
        return (normed if self.gate_first else normed * gate).to(self.dtype)
