"""Mamba-2's mixer (Dao & Gu 2024, https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

from torch import Tensor

from octavo.models.mixers.base import Mixer
from octavo.models.mixers.spec import Mamba2Spec
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build
from octavo.nn.norm import Norm
from octavo.nn.recurrent.coefficients import Coefficients, DecayRates
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.recurrent.gated_norm import GatedNorm
from octavo.nn.recurrent.ssd import Rates, ssd
from octavo.nn.rope import Rope
from octavo.nn.shard import NONE
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class Mamba2(Mixer):
    """A projection to gates, inputs and step sizes; a convolution; a state space per head; a gated norm.

    Every rank computes all heads.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        own = spec.mixer_of(layer)
        assert isinstance(own, Mamba2Spec)
        self.own = own
        self.sizes = [own.inner, own.convolved, own.heads]
        self.in_proj = b.linear("in_proj", inputs=spec.hidden_size, outputs=sum(self.sizes), shard=NONE, bias=own.bias)
        self.conv = CausalConv(b.at("conv1d").path, b.device, own.convolved, own.taps, bias=own.conv_bias)
        self.decay = DecayRates(b.at("A_log").path, b.device, (own.heads,))
        self.skip = Coefficients(b.at("D").path, b.device, (own.heads,))
        self.dt_bias = Coefficients(b.at("dt_bias").path, b.device, (own.heads,))
        self.norm = GatedNorm(
            b.at("norm").path, b.device, b.dtype, own.inner, own.norm_eps, groups=own.groups, gate_first=True
        )
        self.out = b.linear("out_proj", inputs=own.inner, outputs=spec.hidden_size, shard=NONE, bias=own.bias)
        self.states = StateCache([self.conv.state_shape, (own.heads, own.head_dim, own.state)], b.path)

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        own, step = self.own, step.of(self.states.group)
        kept, states = self.states.views()
        gate, mixed, raw = self.in_proj.after_norm(stream, norm).split(self.sizes, -1)
        wide = own.groups * own.state
        x, into, read = self.conv(mixed, kept, step).split([own.inner, wide, wide], -1)
        rates = Rates(self.decay.value, self.skip.value, self.dt_bias.value, *own.limits)
        heads, groups = (own.heads, own.head_dim), (own.groups, own.state)
        y = ssd(x.unflatten(1, heads), raw, into.unflatten(1, groups), read.unflatten(1, groups), rates, states, step)
        return self.norm.gated(y.flatten(1), gate)
