"""The short convolution of LFM2 (https://www.liquid.ai/blog/liquid-foundation-models-v2)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.mixers.base import Mixer, divided
from octavo.models.mixers.spec import ShortConvSpec
from octavo.models.spec import DecoderSpec
from octavo.native.builder import ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.norm import Norm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.rope import Rope
from octavo.nn.shard import ROW, Run, Runs
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class ShortConv(Mixer):
    """c * conv(b * x), with b, c and x from one projection. Ranks divide the channels."""

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        whole, size = spec.mixer_of(layer), spec.hidden_size
        assert isinstance(whole, ShortConvSpec)
        b, own = divided(b, whole)
        channels, form = Run(size), {"bias": own.bias, "activates": False}
        self.in_proj = b.linear("in_proj", inputs=size, outputs=3 * size, shard=Runs(((channels,) * 3,)), bias=own.bias)
        self.conv = CausalConv(b.at("conv").path, b.device, [channels], own.taps, **form, mesh=b.mesh)
        self.out = b.linear("out_proj", inputs=size, outputs=size, shard=ROW, bias=own.bias)
        self.states = StateCache([self.conv.state_shape], b.path)

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        (kept,) = self.states.views()
        before, after, x = self.in_proj.after_norm(stream, norm).chunk(3, -1)
        y: Tensor = self.conv(before * x, kept, step.of(self.states.group))
        return y.mul_(after).to(x.dtype)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        (states,), channels = self.states.in_program(), self.conv.channels
        entry = b.scratch("recurrent entry", 3 * channels * 4)
        self.in_proj.emit_after_norm(b, norm, entry)
        gates, kind = (0, channels), DTYPES[dtype]
        self.conv.emit(b, entry, output, states, self.states.group, begin=2 * channels, gates=gates, dtype=kind)
