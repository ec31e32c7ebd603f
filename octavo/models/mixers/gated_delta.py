"""The gated delta net (Yang et al. 2024, https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from torch import Tensor

from octavo.models.mixers.base import Mixer
from octavo.models.mixers.spec import GatedDeltaSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build
from octavo.nn.norm import Norm
from octavo.nn.recurrent.coefficients import Coefficients, DecayRates
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.recurrent.delta_rule import Gates, gated_delta_rule
from octavo.nn.recurrent.gated_norm import GatedNorm
from octavo.nn.rope import Rope
from octavo.nn.shard import NONE
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class GatedDelta(Mixer):
    """Projections to queries, keys, values, gates, rates and decays; a convolution; the delta rule per head; a gated
    norm of each head.

    Every rank computes all heads.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        own = spec.mixer_of(layer)
        assert isinstance(own, GatedDeltaSpec)
        self.own = own
        keys, values = own.key_heads * own.key_dim, own.heads * own.head_dim
        self.sizes = [keys, keys, values]
        names = ("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")
        outputs = [*self.sizes, values, own.heads, own.heads]
        self.in_proj = b.linear(*names, inputs=spec.hidden_size, outputs=outputs, shard=NONE)
        self.conv = CausalConv(b.at("conv1d").path, b.device, sum(self.sizes), own.taps, bias=False)
        self.decay = DecayRates(b.at("A_log").path, b.device, (own.heads,))
        self.dt_bias = Coefficients(b.at("dt_bias").path, b.device, (own.heads,))
        self.norm = GatedNorm(
            b.at("norm").path, b.device, b.dtype, own.head_dim, spec.norm.eps, groups=own.heads, gate_first=False
        )
        self.out = b.linear("out_proj", inputs=values, outputs=spec.hidden_size, shard=NONE)
        self.states = StateCache([self.conv.state_shape, (own.heads, own.key_dim, own.head_dim)], b.path)

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        own, step = self.own, step.of(self.states.group)
        kept, states = self.states.views()
        mixed, gate, rate, raw = self.in_proj.after_norm(stream, norm).split(
            [sum(self.sizes), self.sizes[2], own.heads, own.heads], -1
        )
        q, k, v = self.conv(mixed, kept, step).split(self.sizes, -1)
        keys, values = (own.key_heads, own.key_dim), (own.heads, own.head_dim)
        gates = Gates(self.decay.value, self.dt_bias.value)
        y = gated_delta_rule(
            q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values), raw, rate, gates, states, step
        )
        return self.norm.gated(y.flatten(1), gate)
