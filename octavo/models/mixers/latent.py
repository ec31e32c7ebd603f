"""Latent attention over a paged cache of one vector per token (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.attention import latent_spec
from octavo.models.mixers.base import Mixer, query_factors
from octavo.models.mixers.spec import LatentSelfAttention
from octavo.models.spec import DecoderSpec
from octavo.native.builder import ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.latent.layer import Expansion
from octavo.nn.linear import Linear
from octavo.nn.norm import Norm, RMSNorm
from octavo.nn.rope import Rope
from octavo.nn.shard import COL, NONE, ROW, Heads
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class LatentAttention(Mixer):
    """Attention whose keys and values are made from latents. Heads are divided over ranks; each has all latents.

    Attributes:
        entry: the projections of the layer's input: to queries, or to what queries are made from, and to latents.
        q_norm, q: make queries from a vector of low rank; None if they are projected at once.
        expansion: makes keys and values.
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        own = spec.mixer_of(layer)
        assert isinstance(own, LatentSelfAttention)
        hidden, width, bias = spec.hidden_size, own.rank + own.rope_dim, own.bias
        heads = Heads(spec.num_heads, 1, own.query_dim, width)
        self.spec = latent_spec(spec, layer, b.mesh)
        self.rope, self.temperature = rope, own.temperature
        self.q_norm: RMSNorm | None = None
        self.q: Linear | None = None
        if own.query_rank:
            outputs = (own.query_rank, width)
            self.entry = b.linear(
                "q_a_proj", "kv_a_proj_with_mqa", inputs=hidden, outputs=outputs, shard=NONE, bias=bias
            )
            self.q_norm = b.norm("q_a_layernorm", own.query_rank, own.norm_eps)
            self.q = b.linear("q_b_proj", inputs=own.query_rank, outputs=heads.outputs[0], shard=COL)
        else:
            outputs = heads.outputs[:2]
            self.entry = b.linear(
                "q_proj", "kv_a_proj_with_mqa", inputs=hidden, outputs=outputs, shard=heads, bias=bias
            )
        self.latent_norm = b.norm("kv_a_layernorm", own.rank, own.norm_eps)
        self.expansion = Expansion(b.at("kv_b_proj").path, b.device, b.dtype, self.spec, spec.num_heads, b.mesh)
        inner = spec.num_heads * own.value_dim
        self.out = b.linear("o_proj", inputs=inner, outputs=hidden, shard=ROW, bias=bias)
        self.attn = b.latent_attention(self.spec)

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        q, latents = self.entry.split(self.entry.after_norm(stream, norm))
        if self.q is not None and self.q_norm is not None:
            q = self.q.after_norm(Stream(q.contiguous()), self.q_norm)
        heads = q.unflatten(-1, (self.spec.num_heads, self.spec.query_dim))
        if self.temperature is not None:
            heads.mul_(query_factors(step.positions, self.temperature)[:, None, None])
        kept = self.latent_norm.weight, self.latent_norm.eps
        return self.attn(heads, latents, kept, self.rope.cos_sin, self.expansion.weight, step).flatten(1)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        entry = queries = b.scratch("latent entry", sum(self.entry.sizes) * 4)
        self.entry.emit_after_norm(b, norm, entry)
        if self.q is not None and self.q_norm is not None:
            queries = b.scratch("latent queries", self.q.sizes[0] * 4)
            self.q.emit_after_norm(b, self.q_norm, queries, source=entry)
        kept = self.latent_norm.weight, self.latent_norm.eps
        latents = entry, self.entry.sizes[0]
        tempered = None if self.temperature is None else self.temperature.in_program
        self.attn.emit(b, queries, latents, output, kept, self.rope.cos_sin, self.expansion.weight, tempered)
