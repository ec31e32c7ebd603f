"""The pre-norm decoder of all families: Llama's architecture, with variations given in `DecoderSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.models.spec import DecoderSpec
from octavo.native.bindings import Dtype, Epilogue
from octavo.native.program import ATTENDED, LOGITS, RESIDUAL, ProgramBuilder
from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import Build
from octavo.nn.embedding import TiedHead
from octavo.nn.linear import Projection
from octavo.nn.norm import RMSNorm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.rope import Rope
from octavo.nn.shard import COL, NONE, ROW, Heads
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    if TYPE_CHECKING:

        def __call__(self, stream: Stream, norm: RMSNorm, step: StepInput, /) -> Tensor: ...

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        own = heads.local(b.mesh)
        self.head_dim = spec.head_dim
        self.head_counts = [own.heads, own.kv_heads, own.kv_heads]
        self.rope = rope
        self.qkv = b.linear(
            "q_proj",
            "k_proj",
            "v_proj",
            inputs=spec.hidden_size,
            outputs=heads.outputs,
            shard=heads,
            bias="qkv" in spec.biases,
        )
        self.out = b.linear(
            "o_proj", inputs=heads.outputs[0], outputs=spec.hidden_size, shard=ROW, bias="o" in spec.biases
        )
        self.q_norm = b.norm("q_norm", spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = b.norm("k_norm", spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.attn = b.attention(
            AttentionSpec(
                num_heads=own.heads,
                num_kv_heads=own.kv_heads,
                head_dim=spec.head_dim,
                scale=spec.head_dim**-0.5,
                window=spec.windows[layer],
            )
        )

    def forward(self, stream: Stream, norm: RMSNorm, step: StepInput) -> Tensor:
        """Return attention over norm(stream), before the output projection: [T, num_heads * head_dim]."""
        heads = self.qkv.after_norm(stream, norm).unflatten(-1, (-1, self.head_dim))
        if self.attn.fused:
            return self.attn.rotated(heads, self._norms(), self.rope.cos_sin, step).flatten(1)
        q, k, v = heads.split(self.head_counts, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions)
        else:
            self.rope.joint(heads[:, : -self.head_counts[2]], step.positions)
        return self.attn(q, k, v, step).flatten(1)

    def emit(self, b: ProgramBuilder, norm: RMSNorm, dtype: torch.dtype, attended: int) -> None:
        """Add `forward`, from the residual stream to the buffer `attended`, to a native program."""
        heads = b.scratch("heads", sum(self.qkv.sizes) * 4)
        self.qkv.emit_after_norm(b, norm, heads)
        self.attn.emit(b, heads, attended, dtype, self._norms(), self.rope.cos_sin)

    def _norms(self) -> Norms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, b: Build, spec: DecoderSpec) -> None:
        super().__init__()
        bias = "mlp" in spec.biases
        self.gate_up = b.linear(
            "gate_proj",
            "up_proj",
            inputs=spec.hidden_size,
            outputs=spec.intermediate_size,
            shard=COL,
            bias=bias,
            gates=True,
        )
        self.down = b.linear("down_proj", inputs=spec.intermediate_size, outputs=spec.hidden_size, shard=ROW, bias=bias)

    def forward(self, stream: Stream, norm: RMSNorm) -> None:
        """Add the block's output for norm(stream) to the stream."""
        self.down.into(stream, self.gate_up.after_norm(stream, norm, gated=True))

    def emit(self, b: ProgramBuilder, norm: RMSNorm) -> None:
        """Add `forward` to a native program."""
        down = self.down.matrix
        dtype = Dtype.BFLOAT if b.meets(down.dtype) is Dtype.BFLOAT else Dtype.FLOAT
        gated = b.scratch("gated", down.columns * 4)
        self.gate_up.emit_after_norm(b, norm, gated, Epilogue.GATE, dtype)
        self.down.emit(b, gated, dtype, RESIDUAL, Epilogue.ADD)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm, each added to the residual stream."""

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        self.input_norm = b.norm("input_layernorm", spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(b.at("self_attn"), spec, layer, rope)
        self.post_norm = b.norm("post_attention_layernorm", spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(b.at("mlp"), spec)

    def forward(self, stream: Stream, step: StepInput, rows: Tensor | None = None) -> None:
        """Add the layer's outputs to the stream; with `rows` [S], compute only these tokens after attention."""
        attended = self.attention(stream, self.input_norm, step)
        stream.choose(rows)
        self.attention.out.into(stream, attended if rows is None else attended.index_select(0, rows))
        self.mlp(stream, self.post_norm)

    @property
    def after_attention(self) -> list[Projection]:
        """The projections that compute only the tokens of `rows`."""
        return [self.attention.out, *(one for one in self.mlp.modules() if isinstance(one, Projection))]

    def emit(self, b: ProgramBuilder, dtype: torch.dtype, attended: int) -> None:
        """Add `forward` to a native program; `attended` is the buffer for attention's output.

        The last mark "rest" is the place from which on tokens are independent.
        """
        self.attention.emit(b, self.input_norm, dtype, attended)
        b.mark("rest")
        self.attention.out.emit(b, attended, DTYPES[dtype], RESIDUAL, Epilogue.ADD)
        self.mlp.emit(b, self.post_norm)


class CausalLM(nn.Module):
    """A decoder-only language model in three steps, so that callers can intervene between them.

    Attributes:
        spec: its architecture.
        attention_layers: in layer order.
        cached_layers: these and the recurrent layers' states, in layer order; the worker binds each one's `cache`.
    """

    recordable = True

    def __init__(self, b: Build, spec: DecoderSpec) -> None:
        super().__init__()
        model = b.at("model")
        self.spec = spec
        self.residual_dtype = b.residual_dtype(spec.hidden_size)
        self.embedding = model.embedding("embed_tokens", spec.vocab_size, spec.hidden_size)
        self.rope = b.rope(spec.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(model.at("layers", i), spec, i, self.rope) for i in range(spec.num_layers)
        )
        self.norm = model.norm("norm", spec.hidden_size, spec.rms_norm_eps)
        shard = NONE if spec.vocab_size % b.mesh.size else COL
        self.head = (
            b.tied_head("lm_head", self.embedding)
            if spec.tied
            else b.linear("lm_head", inputs=spec.hidden_size, outputs=spec.vocab_size, shard=shard, gather=True)
        )
        self.attention_layers = [m for m in self.modules() if isinstance(m, PagedAttention)]
        self.cached_layers = [m for m in self.modules() if isinstance(m, PagedAttention | StateCache)]

    def embed(self, step: StepInput) -> Tensor:
        """Return the embeddings of `step.input_ids`, [T, hidden_size], which the caller may modify."""
        return self.embedding(step.input_ids).to(self.residual_dtype)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """Run the layers on x [T, hidden_size]; return the states before the final norm: [T, hidden_size], or
        [S, hidden_size] of `step.hidden_rows`.

        Reads and writes the KV caches. Does not modify x.
        """
        stream, last = Stream(x), len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            layer(stream, step, step.hidden_rows if i == last else None)
        return stream.total()

    def pack(self) -> None:
        """Convert all weights to the CPU kernels' format, for `emit`; `forward` can't be used afterwards."""
        for layer in self.modules():
            if isinstance(layer, Projection | RMSNorm):
                layer.pack()
        if not isinstance(self.head, TiedHead):
            self.embedding.pack()

    def emit(self, b: ProgramBuilder) -> None:
        """Add the model to a native program: the embedding, the layers, from the mark "head" on final norm and head."""
        (self.head if isinstance(self.head, TiedHead) else self.embedding).emit_lookup(b)
        attended = b.scratch("attended", self.spec.num_heads * self.spec.head_dim * 4)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            layer.emit(b, self.embedding.dtype, attended if i < len(self.layers) - 1 else ATTENDED)
        b.mark("head")
        self.head.emit_after_norm(b, self.norm, LOGITS)

    def final(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to [S, hidden_size]; return the model's dtype."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head: [S, hidden_size] to [S, vocab_size].

        On a GPU the logits are float32; rounded to bfloat16, those of the best two tokens would often be equal.
        """
        return self.head.after_norm(Stream(hidden), self.norm, wide=True)
