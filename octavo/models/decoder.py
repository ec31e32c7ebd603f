"""The decoder of all families, with the variations that `DecoderSpec` describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.core.errors import ConfigError
from octavo.models.attention import attention_spec
from octavo.models.feed_forwards.table import make_feed_forward
from octavo.models.spec import DecoderSpec, NormSpec
from octavo.native.bindings import Epilogue
from octavo.native.program import ATTENDED, LOGITS, RESIDUAL, ProgramBuilder
from octavo.nn.attention.base import Norms
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import Build
from octavo.nn.embedding import TiedHead
from octavo.nn.linear import Projection
from octavo.nn.norm import NoNorm, Norm, RMSNorm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.rope import Rope
from octavo.nn.shard import COL, NONE, ROW, Heads
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream, StreamOutput


def make_norm(b: Build, name: str | None, size: int, spec: NormSpec) -> Norm:
    """Make the norm with this name; one that changes nothing if there is none."""
    if name is None:
        return NoNorm(b.path, b.device, b.dtype, size)
    if spec.kind == "rms":
        return b.norm(name, size, spec.eps, offset=spec.offset)
    return b.layer_norm(name, size, spec.eps, bias=spec.bias, scaled=spec.scaled, offset=spec.offset)


def make_head_norm(b: Build, name: str, heads: int, spec: DecoderSpec) -> Norm | None:
    """Make the norm of queries or keys; None if there is none.

    Raises:
        ConfigError: one norm over the heads of several devices.
    """
    norms = spec.head_norms
    if norms is None:
        return None
    if norms.over == "heads":
        own = norms.norm
        return b.layer_norm(name, spec.head_dim, own.eps, bias=own.bias, offset=own.offset, heads=heads)
    if norms.over == "all" and b.mesh.size > 1:
        raise ConfigError("This model normalizes all heads together, so it can't be divided over devices. Use one.")
    return make_norm(b, name, spec.head_dim * (heads if norms.over == "all" else 1), norms.norm)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    if TYPE_CHECKING:

        def __call__(self, stream: Stream, norm: Norm, step: StepInput, /) -> Tensor: ...

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        own = heads.local(b.mesh)
        self.head_dim = spec.head_dim
        self.head_counts = [own.heads, own.kv_heads, own.kv_heads]
        self.rope = rope
        self.clip = spec.qkv_clip
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
        self.q_norm = make_head_norm(b, "q_norm", own.heads, spec)
        self.k_norm = make_head_norm(b, "k_norm", own.kv_heads, spec)
        self._fuses_norms = spec.fuses_head_norms
        self.attn = b.attention(attention_spec(spec, layer, b.mesh))

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        """Return attention over norm(stream), before the output projection: [T, num_heads * head_dim]."""
        qkv = self.qkv.after_norm(stream, norm)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        if not self._fuses_norms:
            self._normalize(heads)
        if self.attn.fused:
            return self.attn.rotated(heads, self._norms(), self.rope.cos_sin, step).flatten(1)
        q, k, v = heads.split(self.head_counts, dim=1)
        if self._fuses_norms and self.q_norm is not None and self.k_norm is not None:
            q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions)
        elif self.rope.spec.rotary_dim:
            self.rope.joint(heads[:, : -self.head_counts[2]], step.positions)
        return self.attn(q, k, v, step).flatten(1)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, attended: int) -> None:
        """Add `forward`, from the residual stream to the buffer `attended`, to a native program."""
        heads = b.scratch("heads", sum(self.qkv.sizes) * 4)
        self.qkv.emit_after_norm(b, norm, heads)
        self.attn.emit(b, heads, attended, dtype, self._norms(), self.rope.cos_sin)

    def _normalize(self, heads: Tensor) -> None:
        """Normalize queries and keys in place."""
        q, k, _ = heads.split(self.head_counts, dim=1)
        for part, norm in ((q, self.q_norm), (k, self.k_norm)):
            if norm is not None:
                whole = norm.size != self.head_dim
                part.copy_(norm(part.flatten(1)).view_as(part) if whole else norm(part))

    def _norms(self) -> Norms | None:
        """Return the norms that the backend computes."""
        if not self._fuses_norms or self.q_norm is None or self.k_norm is None:
            return None
        assert isinstance(self.q_norm, RMSNorm)
        assert isinstance(self.k_norm, RMSNorm)
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps


class DecoderLayer(nn.Module):
    """Attention and feed-forward, with the family's norms around them, each added to the residual stream."""

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        norms, size = spec.norms, spec.hidden_size
        self.parallel, self.multiplier = norms.parallel, spec.multipliers.residual
        self.input_norm = make_norm(b, norms.before_attention, size, spec.norm)
        self.attention = Attention(b.at("self_attn"), spec, layer, rope)
        self.attended_norm = make_norm(b, norms.after_attention, size, spec.norm) if norms.after_attention else None
        shared = norms.parallel and norms.before_mlp is None
        self.post_norm = self.input_norm if shared else make_norm(b, norms.before_mlp, size, spec.norm)
        self.mlp = make_feed_forward(b.at("mlp"), spec, layer)
        self.mlp_norm = make_norm(b, norms.after_mlp, size, spec.norm) if norms.after_mlp else None

    def forward(self, stream: Stream, step: StepInput, rows: Tensor | None = None) -> None:
        """Add the layer's outputs to the stream; with `rows` [S], compute only these tokens after attention."""
        attended = self.attention(stream, self.input_norm, step)
        stream.choose(rows)
        if rows is not None:
            attended = attended.index_select(0, rows)
        inner = self.mlp(stream, self.post_norm) if self.parallel else None
        self._add(stream, self.attention.out, attended, self.attended_norm)
        self._add(stream, self.mlp.out, self.mlp(stream, self.post_norm) if inner is None else inner, self.mlp_norm)

    def _add(self, stream: Stream, out: StreamOutput, x: Tensor, norm: Norm | None) -> None:
        """Add norm(out(x)), times the multiplier, to the stream."""
        if norm is None and self.multiplier == 1.0:
            out.into(stream, x)
            return
        y = out(x) if norm is None else norm(out(x))
        stream.add_later(y if self.multiplier == 1.0 else y.mul_(self.multiplier))

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
        # Models are trained with this factor in their own dtype.
        self.embedding_multiplier = torch.tensor(spec.multipliers.embedding, dtype=b.dtype).item()
        self.embedding = model.embedding("embed_tokens", spec.vocab_size, spec.hidden_size)
        self.positions = (
            model.embedding("embed_positions", spec.learned_positions, spec.hidden_size)
            if spec.learned_positions
            else None
        )
        self.embedding_norm = (
            make_norm(model, "embed_norm", spec.hidden_size, spec.embedding_norm) if spec.embedding_norm else None
        )
        self.ropes = nn.ModuleList(b.rope(rope) for rope in dict.fromkeys(spec.ropes or (spec.rope,)))
        self.layers = nn.ModuleList(
            DecoderLayer(model.at("layers", i), spec, i, self.rope_of(i)) for i in range(spec.num_layers)
        )
        self.norm = make_norm(model, "norm", spec.hidden_size, spec.norm)
        shard = NONE if spec.vocab_size % b.mesh.size else COL
        self.head = (
            b.tied_head("lm_head", self.embedding)
            if spec.tied
            else b.linear(
                "lm_head",
                inputs=spec.hidden_size,
                outputs=spec.vocab_size,
                shard=shard,
                bias="head" in spec.biases,
                gather=True,
            )
        )
        self.attention_layers = [m for m in self.modules() if isinstance(m, PagedAttention)]
        self.cached_layers = [m for m in self.modules() if isinstance(m, PagedAttention | StateCache)]

    def rope_of(self, layer: int) -> Rope:
        """Return a layer's table of rotations; layers with equal ones share it."""
        wanted = self.spec.rope_of(layer)
        return next(rope for rope in self.ropes if isinstance(rope, Rope) and rope.spec == wanted)

    def embed(self, step: StepInput) -> Tensor:
        """Return the embeddings of `step.input_ids`, [T, hidden_size], which the caller may modify."""
        x = self.embedding(step.input_ids).to(self.residual_dtype)
        return x if self.embedding_multiplier == 1.0 else x.mul_(self.embedding_multiplier)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """Run the layers on x [T, hidden_size]; return the states before the final norm: [T, hidden_size], or
        [S, hidden_size] of `step.hidden_rows`.

        Reads and writes the KV caches. Does not modify x.
        """
        stream, last = Stream(self._entering(x, step)), len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            layer(stream, step, step.hidden_rows if i == last else None)
        return stream.total()

    def _entering(self, x: Tensor, step: StepInput) -> Tensor:
        """Return the first layer's input for embeddings x: with learned positions, and normalized, if the model is."""
        if self.positions is not None:
            x = x + self.positions(step.positions + self.spec.position_offset)
        return x if self.embedding_norm is None else self.embedding_norm(x).to(x.dtype)

    def pack(self) -> None:
        """Convert all weights to the CPU kernels' format, for `emit`; `forward` can't be used afterwards."""
        for layer in self.modules():
            if isinstance(layer, Projection | Norm):
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
        logits = self.head.after_norm(Stream(hidden), self.norm, wide=True)
        if self.spec.multipliers.logits != 1.0:
            logits = logits.mul_(self.spec.multipliers.logits)
        cap = self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
