"""Attention over the keys and values of an earlier layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from octavo.models.mixers.attention import Attention, make_head_norm
from octavo.models.mixers.base import Mixer
from octavo.models.mixers.spec import SharedSelfAttention
from octavo.models.spec import DecoderSpec
from octavo.native.builder import ProgramBuilder
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import Build
from octavo.nn.norm import Norm, RMSNorm
from octavo.nn.rope import Rope
from octavo.nn.shard import COL, ROW, Heads
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class SharedAttention(Mixer):
    """Attention with queries of its own only; keys and values are those of the layer `source`.

    Attributes:
        source: number of that layer.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        kind, heads = spec.mixer_of(layer), Heads(*spec.heads_of(layer))
        assert isinstance(kind, SharedSelfAttention)
        self.source, self.heads, self.rope = kind.source, heads.local(b.mesh), rope
        size, width = spec.hidden_size, heads.outputs[0]
        self.q = b.linear("q_proj", inputs=size, outputs=width, shard=COL, bias="qkv" in spec.biases)
        self.out = b.linear("o_proj", inputs=width, outputs=size, shard=ROW, bias="o" in spec.biases)
        self.q_norm = make_head_norm(b, 0, spec, heads)
        # In a list, so that the layer is registered as a submodule once, where it belongs.
        self._kept: list[PagedAttention] = []

    def take(self, kept: PagedAttention) -> None:
        """Set the attention whose keys and values are read."""
        self._kept = [kept]

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        """Return attention over norm(stream), before the output projection: [T, num_heads * head_dim]."""
        (kept,) = self._kept
        q = self.q.after_norm(stream, norm).unflatten(-1, (-1, self.heads.head_dim))
        q = q if self.q_norm is None else self.q_norm(q)
        return kept.read(self.rope.joint(q, step.positions, step.rotations), step).flatten(1)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        (kept,) = self._kept
        assert self.q_norm is None or isinstance(self.q_norm, RMSNorm)
        heads = b.scratch("heads", sum(self.q.sizes) * 4)
        self.q.emit_after_norm(b, norm, heads)
        kept.emit_read(b, heads, output, dtype, self.q_norm, self.rope.cos_sin)


def share_caches(layers: Iterable[nn.Module]) -> None:
    """Give the attention of a decoder's layers that read another layer's keys and values that layer's."""
    mixers = [getattr(layer, "mixer", None) for layer in layers]
    for mixer in mixers:
        if isinstance(mixer, SharedAttention):
            source = mixers[mixer.source]
            assert isinstance(source, Attention)
            mixer.take(source.attn)
