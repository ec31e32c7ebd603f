"""Mamba-2's mixer (Dao & Gu 2024, https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.mixers.base import Mixer, divided
from octavo.models.mixers.spec import Mamba2Spec
from octavo.models.spec import DecoderSpec
from octavo.native import recurrent
from octavo.native.builder import ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.norm import Norm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.recurrent.coefficients import Coefficients, DecayRates
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.recurrent.gated_norm import DividedGatedNorm, GatedNorm
from octavo.nn.recurrent.ssd import Rates, ssd
from octavo.nn.rope import Rope
from octavo.nn.shard import ROW, Run, Runs
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class Mamba2(Mixer):
    """A projection to gates, inputs and step sizes; a convolution; a state space per head; a gated norm.

    Ranks divide the heads; ranks with heads of one group have the same inputs to and outputs from their states.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        whole = spec.mixer_of(layer)
        assert isinstance(whole, Mamba2Spec)
        b, own = divided(b, whole)
        self.own = own
        self.sizes = [own.inner, own.convolved, own.heads]
        heads, states = Run(whole.heads, whole.head_dim), Run(whole.groups, whole.state)
        kinds = Runs(((heads, heads, states, states, Run(whole.heads)),))
        size, outputs = spec.hidden_size, sum(run.size for run in kinds.parts[0])
        self.in_proj = b.linear("in_proj", inputs=size, outputs=outputs, shard=kinds, bias=own.bias)
        convolved = [heads, states, states]
        path = b.at("conv1d").path
        self.conv = CausalConv(path, b.device, convolved, own.taps, bias=own.conv_bias, mesh=b.mesh)
        self.decay = DecayRates(b.at("A_log").path, b.device, (whole.heads,), b.mesh)
        self.skip = Coefficients(b.at("D").path, b.device, (whole.heads,), b.mesh)
        self.dt_bias = Coefficients(b.at("dt_bias").path, b.device, (whole.heads,), b.mesh)
        self.norm = self._norm(b, whole)
        self.out = b.linear("out_proj", inputs=whole.inner, outputs=size, shard=ROW, bias=own.bias)
        self.states = StateCache([self.conv.state_shape, (own.heads, own.head_dim, own.state)], b.path)

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        own, step = self.own, step.of(self.states.group)
        kept, states = self.states.views()
        gate, mixed, raw = self.in_proj.after_norm(stream, norm).split(self.sizes, -1)
        wide = own.groups * own.state
        x, into, read = self.conv(mixed, kept, step).split([own.inner, wide, wide], -1)
        rates = self._rates
        heads, groups = (own.heads, own.head_dim), (own.groups, own.state)
        y = ssd(x.unflatten(1, heads), raw, into.unflatten(1, groups), read.unflatten(1, groups), rates, states, step)
        return self.norm.gated(y.flatten(1), gate)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        own, group, (kept, states) = self.own, self.states.group, self.states.in_program()
        entry = b.scratch("recurrent entry", sum(self.in_proj.sizes) * 4)
        mixed = b.scratch("recurrent inputs", own.convolved * 4)
        self.in_proj.emit_after_norm(b, norm, entry)
        self.conv.emit(b, entry, mixed, kept, group, begin=own.inner)
        space = self._rates.in_program(b)
        space.states, space.sizes, space.raw = states, entry, own.inner + own.convolved
        space.heads, space.head_dim, space.state, space.groups = own.heads, own.head_dim, own.state, own.groups
        recurrent.scan_heads(b, space, mixed, group)
        self.norm.emit_gated(b, (mixed, 0), (entry, 0), output, DTYPES[dtype], own.inner)

    @property
    def _rates(self) -> Rates:
        return Rates(self.decay.value, self.skip.value, self.dt_bias.value, *self.own.limits)

    @staticmethod
    def _norm(b: Build, whole: Mamba2Spec) -> GatedNorm:
        """Make the norm of this rank's heads."""
        place, groups = (b.at("norm").path, b.device, b.dtype, whole.inner, whole.norm_eps), whole.groups
        if b.mesh.size == 1:
            return GatedNorm(*place, groups=groups, gate_first=True)
        return DividedGatedNorm(*place, groups=groups, gate_first=True, mesh=b.mesh)
