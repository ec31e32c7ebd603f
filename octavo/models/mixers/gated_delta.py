"""The gated delta net (Yang et al. 2024, https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.mixers.base import Mixer, divided
from octavo.models.mixers.spec import GatedDeltaSpec
from octavo.models.spec import DecoderSpec
from octavo.native import recurrent
from octavo.native.builder import ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.norm import Norm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.recurrent.coefficients import Coefficients, DecayRates
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.recurrent.delta_rule import Gates, gated_delta_rule
from octavo.nn.recurrent.gated_norm import GatedNorm
from octavo.nn.rope import Rope
from octavo.nn.shard import ROW, Run, Runs
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class GatedDelta(Mixer):
    """Projections to queries, keys, values, gates, rates and decays; a convolution; the delta rule per head; a gated
    norm of each head.

    Ranks divide the heads of values, each with its head of queries and keys.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        whole = spec.mixer_of(layer)
        assert isinstance(whole, GatedDeltaSpec)
        b, own = divided(b, whole)
        self.own = own
        keys, values = own.key_heads * own.key_dim, own.heads * own.head_dim
        self.sizes = [keys, keys, values]
        names = ("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")
        key_heads, heads, rates = Run(whole.key_heads, own.key_dim), Run(whole.heads, own.head_dim), Run(whole.heads)
        kinds = (key_heads, key_heads, heads, heads, rates, rates)
        outputs, shard = [kind.size for kind in kinds], Runs(tuple((kind,) for kind in kinds))
        self.in_proj = b.linear(*names, inputs=spec.hidden_size, outputs=outputs, shard=shard)
        self.conv = CausalConv(b.at("conv1d").path, b.device, kinds[:3], own.taps, bias=False, mesh=b.mesh)
        self.decay = DecayRates(b.at("A_log").path, b.device, (whole.heads,), b.mesh)
        self.dt_bias = Coefficients(b.at("dt_bias").path, b.device, (whole.heads,), b.mesh)
        self.norm = GatedNorm(
            b.at("norm").path, b.device, b.dtype, own.head_dim, spec.norm.eps, groups=own.heads, gate_first=False
        )
        self.out = b.linear("out_proj", inputs=heads.size, outputs=spec.hidden_size, shard=ROW)
        self.states = StateCache([self.conv.state_shape, (own.heads, own.key_dim, own.head_dim)], b.path)

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        own, step = self.own, step.of(self.states.group)
        kept, states = self.states.views()
        mixed, gate, rate, raw = self.in_proj.after_norm(stream, norm).split(
            [sum(self.sizes), self.sizes[2], own.heads, own.heads], -1
        )
        q, k, v = self.conv(mixed, kept, step).split(self.sizes, -1)
        keys, values = (own.key_heads, own.key_dim), (own.heads, own.head_dim)
        gates = self._gates
        y = gated_delta_rule(
            q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values), raw, rate, gates, states, step
        )
        return self.norm.gated(y.flatten(1), gate)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        own, group, (kept, states) = self.own, self.states.group, self.states.in_program()
        entry = b.scratch("recurrent entry", sum(self.in_proj.sizes) * 4)
        mixed = b.scratch("recurrent inputs", own.convolved * 4)
        self.in_proj.emit_after_norm(b, norm, entry)
        self.conv.emit(b, entry, mixed, kept, group)
        rule, values = self._gates.in_program(b), self.sizes[2]
        rule.states, rule.gates, rule.rate = states, entry, own.convolved + values
        rule.raw = rule.rate + own.heads
        rule.key_heads, rule.key_dim, rule.heads, rule.head_dim = own.key_heads, own.key_dim, own.heads, own.head_dim
        recurrent.apply_delta_rule(b, rule, mixed, group)
        begin = own.convolved - values
        self.norm.emit_gated(b, (mixed, begin), (entry, own.convolved), output, DTYPES[dtype], values)

    @property
    def _gates(self) -> Gates:
        return Gates(self.decay.value, self.dt_bias.value)
