"""Mamba's mixer (Gu & Dao 2023, https://arxiv.org/abs/2312.00752)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from octavo.models.mixers.base import Mixer, divided
from octavo.models.mixers.spec import MambaSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build
from octavo.nn.norm import Norm
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
