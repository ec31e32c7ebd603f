"""Mamba's mixer (Gu & Dao 2023, https://arxiv.org/abs/2312.00752)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.models.mixers.base import Mixer, divided
from octavo.models.mixers.spec import MambaSpec
from octavo.models.spec import DecoderSpec
from octavo.native import recurrent
from octavo.native.bindings import Dtype
from octavo.native.builder import ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.norm import Norm, RMSNorm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.recurrent.coefficients import Coefficients, DecayRates
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.recurrent.selective import selective_scan
from octavo.nn.rope import Rope
from octavo.nn.shard import COL, ROW, Run, Runs
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class Mamba(Mixer):
    """A projection to inputs and gates; a convolution; a state space per channel, whose step sizes, inputs and outputs
    depend on the token; a gate.

    Ranks divide the channels.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        whole = spec.mixer_of(layer)
        assert isinstance(whole, MambaSpec)
        b, own = divided(b, whole)
        self.own = own
        self.sizes = [own.rank, own.state, own.state]
        channels, size = Run(whole.inner), spec.hidden_size
        both = Runs(((channels, channels),))
        self.in_proj = b.linear("in_proj", inputs=size, outputs=2 * whole.inner, shard=both, bias=own.bias)
        path = b.at("conv1d").path
        self.conv = CausalConv(path, b.device, [channels], own.taps, bias=own.conv_bias, mesh=b.mesh)
        self.x_proj = b.linear("x_proj", inputs=whole.inner, outputs=sum(self.sizes), shard=ROW)
        self.dt_proj = b.linear("dt_proj", inputs=own.rank, outputs=whole.inner, shard=COL, bias=True)
        self.decay = DecayRates(b.at("A_log").path, b.device, (whole.inner, own.state), b.mesh)
        self.skip = Coefficients(b.at("D").path, b.device, (whole.inner,), b.mesh)
        names = ("dt_layernorm", "b_layernorm", "c_layernorm") if own.norm_eps is not None and own.norm_scaled else ()
        self.norms = nn.ModuleList(
            b.norm(name, size, own.norm_eps or 0.0) for name, size in zip(names, self.sizes, strict=False)
        )
        self.out = b.linear("out_proj", inputs=whole.inner, outputs=size, shard=ROW, bias=own.bias)
        self.states = StateCache([self.conv.state_shape, (own.inner, own.state)], b.path)

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        step = step.of(self.states.group)
        kept, states = self.states.views()
        mixed, gate = self.in_proj.after_norm(stream, norm).chunk(2, -1)
        x = self.conv(mixed, kept, step)
        parts = self.x_proj(x.to(mixed.dtype)).split(self.sizes, -1)
        sizes, into, read = self._normalized(parts)
        dt = F.softplus(self.dt_proj(sizes).float())
        y = selective_scan(x, dt, into.float(), read.float(), self.decay.value, self.skip.value, states, step)
        return (y * F.silu(gate.float())).to(mixed.dtype)

    def _normalized(self, parts: Sequence[Tensor]) -> list[Tensor]:
        eps = self.own.norm_eps
        if len(self.norms):
            return [norm(part.contiguous()) for norm, part in zip(self.norms, parts, strict=True)]
        return [part if eps is None else F.rms_norm(part, (part.shape[-1],), eps=eps) for part in parts]

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        own, group, (kept, states) = self.own, self.states.group, self.states.in_program()
        entry = b.scratch("recurrent entry", sum(self.in_proj.sizes) * 4)
        x = b.scratch("recurrent inputs", own.inner * 4)
        parts = b.scratch("recurrent parts", sum(self.x_proj.sizes) * 4)
        sizes = b.scratch("recurrent step sizes", sum(self.dt_proj.sizes) * 4)
        self.in_proj.emit_after_norm(b, norm, entry)
        self.conv.emit(b, entry, x, kept, group)
        self.x_proj.emit_summed(b, x, Dtype.FLOAT, parts)
        self._emit_norms(b, parts)
        self.dt_proj.emit(b, parts, Dtype.FLOAT, sizes)
        decay, skip = self.decay.value, self.skip.value
        b.kept.extend((decay, skip))
        space = recurrent.Scan(decay=decay.data_ptr(), skip=skip.data_ptr(), states=states, sizes=sizes, parts=parts)
        space.channels, space.state, space.gates, space.gate = own.inner, own.state, entry, own.inner
        space.into, space.read = own.rank, own.rank + own.state
        recurrent.scan_channels(b, space, x, output, DTYPES[dtype], group)

    def _emit_norms(self, b: ProgramBuilder, parts: int) -> None:
        """Add `_normalized` to a native program, in place."""
        begin = 0
        for i, size in enumerate(self.sizes):
            if self.own.norm_eps is not None:
                norm = recurrent.GatedNorm.alone(size, 1, self.own.norm_eps)
                norm.begin = norm.to = begin
                if len(self.norms):
                    own = self.norms[i]
                    assert isinstance(own, RMSNorm)
                    norm.weight = own.weight.data_ptr()
                recurrent.norm_gated(b, norm, parts, parts, Dtype.FLOAT)
            begin += size
