"""Mamba's mixer (Gu & Dao 2023, https://arxiv.org/abs/2312.00752)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from octavo.models.mixers.base import Mixer
from octavo.models.mixers.spec import MambaSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build
from octavo.nn.norm import Norm
from octavo.nn.recurrent.coefficients import Coefficients, DecayRates
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.recurrent.selective import selective_scan
from octavo.nn.rope import Rope
from octavo.nn.shard import NONE
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class Mamba(Mixer):
    """A projection to inputs and gates; a convolution; a state space per channel, whose step sizes, inputs and outputs
    depend on the token; a gate.

    Every rank computes all channels.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        own = spec.mixer_of(layer)
        assert isinstance(own, MambaSpec)
        self.own = own
        self.sizes = [own.rank, own.state, own.state]
        self.in_proj = b.linear("in_proj", inputs=spec.hidden_size, outputs=2 * own.inner, shard=NONE, bias=own.bias)
        self.conv = CausalConv(b.at("conv1d").path, b.device, own.inner, own.taps, bias=own.conv_bias)
        self.x_proj = b.linear("x_proj", inputs=own.inner, outputs=sum(self.sizes), shard=NONE)
        self.dt_proj = b.linear("dt_proj", inputs=own.rank, outputs=own.inner, shard=NONE, bias=True)
        self.decay = DecayRates(b.at("A_log").path, b.device, (own.inner, own.state))
        self.skip = Coefficients(b.at("D").path, b.device, (own.inner,))
        names = ("dt_layernorm", "b_layernorm", "c_layernorm") if own.norm_eps is not None and own.norm_scaled else ()
        self.norms = nn.ModuleList(
            b.norm(name, size, own.norm_eps or 0.0) for name, size in zip(names, self.sizes, strict=False)
        )
        self.out = b.linear("out_proj", inputs=own.inner, outputs=spec.hidden_size, shard=NONE, bias=own.bias)
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
