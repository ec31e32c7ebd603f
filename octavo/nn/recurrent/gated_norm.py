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
            size: of the weight: all channels, or those of a group that all groups share.
            groups: parts of the channels that are normalized separately.
            gate_first: norm(x * silu(gate)) instead of norm(x) * silu(gate).
        """
        super().__init__(path, device, dtype, size, eps)
        self.groups, self.gate_first = groups, gate_first

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm of x [T, channels] float32, by a gate of the same shape."""
        if x.is_cuda:
            from octavo.nn.recurrent import triton_gated_norm  # needs triton, which machines without a GPU may lack

            form = {"gate_first": self.gate_first}
            return triton_gated_norm.gated_norm(x, gate, self.weight, self.eps, self.dtype, self.groups, **form)
        gate = F.silu(gate.float())
        if self.gate_first:
            x = x * gate
        parts = x.unflatten(-1, (self.groups, -1))
        weight = self.weight.float().view(-1, parts.shape[-1])
        normed = (F.rms_norm(parts, (parts.shape[-1],), eps=self.eps) * weight).flatten(-2)
        return (normed if self.gate_first else normed * gate).to(self.dtype)
