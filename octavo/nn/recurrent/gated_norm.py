"""RMSNorm with a gate, behind recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native import recurrent
from octavo.native.bindings import Dtype
from octavo.native.builder import ProgramBuilder
from octavo.nn.norm import RMSNorm
from octavo.nn.weights import TensorSpec, Wanted
from octavo.parallel.mesh import Mesh


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

    def emit_gated(
        self,
        b: ProgramBuilder,
        source: tuple[int, int],
        gate: tuple[int, int],
        output: int,
        dtype: Dtype,
        channels: int,
    ) -> None:
        """Add `gated` to a native program; the layer must be packed.

        Args:
            source, gate: buffers of float32 rows, and where in their rows the channels and gates begin.
            output: buffer for [T, channels] in `dtype`.
        """
        norm = recurrent.GatedNorm.alone(channels // self.groups, self.groups, self.eps)
        norm.weight, norm.own_weights = self.weight.data_ptr(), int(self.size == channels)
        norm.begin, norm.gate_first = source[1], int(self.gate_first)
        norm.gates, norm.gate = gate
        self._emit_sums(b, norm, source[0])
        recurrent.norm_gated(b, norm, source[0], output, dtype)

    def _emit_sums(self, b: ProgramBuilder, norm: recurrent.GatedNorm, source: int) -> None:
        """Add what comes before the norm, if anything, to a native program."""


class DividedGatedNorm(GatedNorm):
    """The gated norm of one of several ranks, which has an equal share of the channels.

    A group may be on one rank or on several, which then exchange their sums of squares.
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
        mesh: Mesh,
    ) -> None:
        """
        Args:
            size: channels of all ranks, each with a weight.
            groups: of all ranks; a multiple of the ranks, or a divisor of their number.
        """
        own = size // mesh.size
        super().__init__(path, device, dtype, own, eps, groups=max(1, groups // mesh.size), gate_first=gate_first)
        self._mesh, self._all_groups = mesh, groups
        index = (slice(mesh.rank * own, (mesh.rank + 1) * own),)
        self._wanted = Wanted(f"{path}.weight", TensorSpec((size,), dtype), index=index)

    def wanted(self) -> list[Wanted]:
        return [self._wanted]

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `GatedNorm.gated`; x and gate have this rank's channels."""
        ranks, groups = self._mesh.size, self._all_groups
        if groups >= ranks:
            return super().gated(x, gate)
        gate = F.silu(gate.float())
        if self.gate_first:
            x = x * gate
        squares = x.new_zeros(len(x), groups)
        own = self._mesh.rank * groups // ranks
        squares[:, own] = x.square().sum(-1)
        mean = self._mesh.all_reduce(squares)[:, own : own + 1] * (groups / (ranks * x.shape[-1]))
        normed = x * torch.rsqrt(mean + self.eps) * self.weight.float()
        return (normed if self.gate_first else normed * gate).to(self.dtype)

    def _emit_sums(self, b: ProgramBuilder, norm: recurrent.GatedNorm, source: int) -> None:
        ranks, groups = self._mesh.size, self._all_groups
        if groups < ranks:
            norm.place, norm.whole = self._mesh.rank * groups // ranks, norm.size * ranks // groups
            recurrent.sum_squares(b, norm, source, groups, self._mesh.exchange)
