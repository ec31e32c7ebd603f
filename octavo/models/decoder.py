"""The one pre-norm decoder: Llama's shape, of which the other families are variations stated in `DecoderSpec`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import Build
from octavo.nn.linear import Linear
from octavo.nn.norm import RMSNorm
from octavo.nn.ops.activation import silu_mul
from octavo.nn.rope import Rope
from octavo.nn.shard import COL, ROW, Heads
from octavo.nn.step import StepInput


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.head_dim = spec.head_dim
        self.head_counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
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
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                scale=spec.head_dim**-0.5,
                window=spec.windows[layer],
            )
        )

    def attended(self, x: Tensor, step: StepInput) -> Tensor:
        """What goes into the output projection: [T, hidden_size] to [T, num_heads * head_dim]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        if self.attn.fused:
            return self.attn.rotated(heads, self._norms(), self.rope.cos_sin, step).flatten(1)
        q, k, v = heads.split(self.head_counts, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions)
        else:
            self.rope.joint(heads[:, : -self.head_counts[2]], step.positions)
        return self.attn(q, k, v, step).flatten(1)

    def add_to(self, stream: Tensor, norm: RMSNorm, step: StepInput) -> None:
        """Attention to norm(stream), added to it; for a few tokens, with fusing layers throughout."""
        qkv, out = self.qkv.fusing, self.out.fusing
        assert qkv is not None
        assert out is not None
        heads = qkv.fused(stream, norm=(norm.weight, norm.eps)).unflatten(-1, (-1, self.head_dim))
        attended = self.attn.rotated(heads, self._norms(), self.rope.cos_sin, step)
        out.fused(attended.flatten(1), add_to=stream)

    @property
    def fused_rows(self) -> int:
        """The most tokens of `add_to`."""
        return _fused_rows(self.qkv, self.out) if self.attn.fused else 0

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
            "gate_proj", "up_proj", inputs=spec.hidden_size, outputs=spec.intermediate_size, shard=COL, bias=bias
        )
        self.down = b.linear("down_proj", inputs=spec.intermediate_size, outputs=spec.hidden_size, shard=ROW, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate(x)) * up(x)."""
        fusing = self.gate_up.fusing
        return silu_mul(self.gate_up(x)) if fusing is None else fusing.gated(x)

    def add_to(self, stream: Tensor, norm: RMSNorm) -> None:
        """What `forward` makes of norm(stream), added to it; for a few tokens, with fusing layers throughout."""
        gate_up, down = self.gate_up.fusing, self.down.fusing
        assert gate_up is not None
        assert down is not None
        down.fused(gate_up.fused(stream, norm=(norm.weight, norm.eps), gated=True), add_to=stream)

    @property
    def fused_rows(self) -> int:
        """The most tokens of `add_to`; a gate with a bias is not fused."""
        return 0 if self.gate_up.parts[0].bias else _fused_rows(self.gate_up, self.down)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm. The residual stream travels beside the last block's output, so
    that the addition can be fused with the next norm."""

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        self.input_norm = b.norm("input_layernorm", spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(b.at("self_attn"), spec, layer, rope)
        self.post_norm = b.norm("post_attention_layernorm", spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(b.at("mlp"), spec)

    def forward(
        self, x: Tensor, residual: Tensor | None, step: StepInput, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] to the same; with `rows` [S], what follows attention is computed for these tokens only."""
        if residual is None:
            normed, residual = self.input_norm(x), x
        else:
            normed, residual = self.input_norm.add(x, residual)
        attended = _chosen(self.attention.attended(normed, step), rows)
        normed, residual = self.post_norm.add(self.attention.out(attended), _chosen(residual, rows))
        return self.mlp(normed), residual

    def accumulate(
        self, stream: Tensor, parts: Tensor | None, step: StepInput, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` where both blocks' last products go to the stream themselves: in place, without `rows`.

        `parts` [P, T, hidden_size], if any, are what the layer before left to add; this one's come with the stream.
        """
        out, down = self.attention.out.fusing, self.mlp.down.fusing
        assert out is not None
        assert down is not None
        attended = _chosen(self.attention.attended(self.input_norm.after(parts, stream), step), rows)
        stream = _chosen(stream, rows)
        parts = out.leave(stream, attended)
        return stream, down.leave(stream, self.mlp.gated(self.post_norm.after(parts, stream)))

    def accumulates(self, dtype: torch.dtype) -> bool:
        """Whether there is `accumulate` for a stream of this dtype."""
        return all(
            layer.fusing is not None and layer.fusing.dtype == dtype and not layer.parts[0].bias
            for layer in (self.attention.out, self.mlp.down)
        )

    def add_to(self, stream: Tensor, step: StepInput) -> None:
        """The layer for a few tokens: all it does is added to `stream` [T, hidden_size]."""
        self.attention.add_to(stream, self.input_norm, step)
        self.mlp.add_to(stream, self.post_norm)


def _chosen(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _fused_rows(*layers: Linear) -> int:
    return min(0 if layer.fusing is None else layer.fusing.fused_rows for layer in layers)


class CausalLM(nn.Module):
    """A decoder-only language model in three steps, between which others may step in.

    Attributes:
        spec: its shape.
        attention_layers: in layer order; the worker binds each one's `cache`.
        accumulates: whether the products that end a block add to the residual stream themselves.
    """

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
        self.head = (
            b.tied_head("lm_head", self.embedding)
            if spec.tied
            else b.linear("lm_head", inputs=spec.hidden_size, outputs=spec.vocab_size, shard=COL)
        )
        self.attention_layers = [m for m in self.modules() if isinstance(m, PagedAttention)]
        self.accumulates = all(layer.accumulates(self.residual_dtype) for layer in self.layers)
        self._fused_rows = min(
            (min(layer.attention.fused_rows, layer.mlp.fused_rows) for layer in self.layers), default=0
        )

    def embed(self, step: StepInput) -> Tensor:
        """[T, hidden_size]: the embeddings of `step.input_ids`, for the caller to change."""
        return self.embedding(step.input_ids).to(self.residual_dtype)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """[T, hidden_size] to the same before the final norm, or to [S, hidden_size] of `step.hidden_rows`.

        Reads and writes the KV caches; x is left as it is.
        """
        rows = step.hidden_rows
        if x.shape[0] <= self._fused_rows:
            stream = x.clone(memory_format=torch.contiguous_format)
            for layer in self.layers:
                layer.add_to(stream, step)
            return _chosen(stream, rows)
        last = len(self.layers) - 1
        if self.accumulates:
            stream, parts = x.clone(memory_format=torch.contiguous_format), None
            for i, layer in enumerate(self.layers):
                stream, parts = layer.accumulate(stream, parts, step, rows if i == last else None)
            return stream if parts is None else stream.add_(parts.sum(0, dtype=torch.float32))
        residual = None
        for i, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step, rows if i == last else None)
        return residual + x

    def final(self, hidden: Tensor) -> Tensor:
        """The final norm: [S, hidden_size] to the same, in the model's dtype."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of the chosen rows: [S, hidden_size] to [S, vocab_size].

        On a GPU they are float32: rounded to bfloat16, the best two tokens are often equal.
        """
        fusing = self.head.fusing
        if fusing is not None and hidden.shape[0] <= fusing.fused_rows:
            return fusing.fused(hidden, norm=(self.norm.weight, self.norm.eps), dtype=torch.float32)
        return self.head.wide(self.norm(hidden))
