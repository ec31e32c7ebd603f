"""Attention over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.attention import attention_spec
from octavo.models.mixers.base import Mixer, query_factors
from octavo.models.mixers.spec import SelfAttention
from octavo.models.norms import make_norm
from octavo.models.spec import DecoderSpec
from octavo.native.bindings import Function
from octavo.native.builder import STORED, ProgramBuilder, Results
from octavo.native.recurrent import gate_by_sigmoid
from octavo.nn.attention.base import Norms
from octavo.nn.build import Build
from octavo.nn.norm import Norm, RMSNorm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.rope import Rope
from octavo.nn.rounded import Activations, Rounded
from octavo.nn.shard import COL, ROW, Heads
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream


def make_head_norm(b: Build, part: int, spec: DecoderSpec, heads: Heads) -> Norm | None:
    """Make the norm of queries (part 0), keys (part 1) or values (part 2); None if there is none.

    Raises:
        ConfigError: one norm other than an RMSNorm over the heads of several devices.
    """
    if spec.head_norms is None:
        return None
    if part == 2:
        own = spec.head_norms.values
        return None if own is None else make_norm(b, "v_norm", heads.head_dim, own)
    name, norm, over = ("q_norm", "k_norm")[part], spec.head_norms.norm, spec.head_norms.over
    if over == "head":
        return make_norm(b, name, heads.head_dim, norm)
    if over == "heads":
        return b.head_norm(name, heads, part, norm.eps, bias=norm.bias, offset=norm.offset)
    if b.mesh.size == 1:
        return make_norm(b, name, heads.outputs[part], norm)
    if norm.kind != "rms" or norm.offset or not norm.scaled:
        raise ConfigError(
            "This model normalizes all heads together, and not by an RMSNorm with weights, so it can't be divided over "
            "devices. Set --tensor-parallel-size 1."
        )
    return b.divided_norm(name, heads, part, norm.eps)


class Attention(Mixer):
    """Grouped-query self-attention with rotary positions; with a gate if the layer's `SelfAttention` has one."""

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        heads = Heads(*spec.heads_of(layer))
        own = heads.local(b.mesh)
        self.head_dim = heads.head_dim
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
        kind = spec.mixer_of(layer)
        assert isinstance(kind, SelfAttention)
        self.temperature = kind.temperature
        gates = spec.num_heads if kind.gates_heads else heads.outputs[0]
        self.gate = b.linear("gate_proj", inputs=spec.hidden_size, outputs=gates, shard=COL) if kind.gated else None
        self._gated_channels = self.head_dim if kind.gates_heads else 1
        self.q_norm, self.k_norm, self.v_norm = (
            make_head_norm(b, part, spec, heads) if kind.normed else None for part in range(3)
        )
        self._fuses_norms = spec.fuses_head_norms
        self._rotates_first = kind.normed and spec.rotates_first
        self.attn = b.attention(attention_spec(spec, layer, b.mesh))

    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        """Return attention over norm(stream), before the output projection: [T, num_heads * head_dim]."""
        gate = None if self.gate is None else self.gate.after_norm(stream, norm)
        attended = self._attended(stream, norm, step)
        if gate is None:
            return attended
        gates = gate.sigmoid_()
        if self._gated_channels == 1:
            return attended.mul_(gates)
        attended.unflatten(-1, (-1, self._gated_channels)).mul_(gates[..., None])
        return attended

    def activations(self, stream: Stream, norm: Norm, step: StepInput) -> Activations:
        rounded_by = self.out.rounds_by(stream.rows) if self.gate is None else None
        if rounded_by is None:
            return self(stream, norm, step)
        attended = self._attended(stream, norm, step, rounded_by)
        return Rounded(attended) if attended.dtype == torch.float8_e4m3fn else attended

    def _attended(self, stream: Stream, norm: Norm, step: StepInput, rounded_by: Tensor | None = None) -> Tensor:
        qkv = self.qkv.after_norm(stream, norm)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        if self.v_norm is not None:
            values = heads[:, -self.head_counts[2] :]
            values.copy_(self.v_norm(values))
        if self._rotates_first:
            self._rotate(heads, step)
        if not self._fuses_norms:
            self._normalize(heads)
        if self.temperature is not None:
            queries = heads[:, : self.head_counts[0]]
            queries.mul_(query_factors(step.positions, self.temperature)[:, None, None])
        if self.attn.fused:
            if self._rotates_first:
                return self.attn.rotated(heads, None, self.rope.still, step, rounded_by).flatten(1)
            table = self.rope.cos_sin if step.rotations is None else step.rotations
            return self.attn.rotated(heads, self._norms(), table, step, rounded_by).flatten(1)
        q, k, v = heads.split(self.head_counts, dim=1)
        if self._fuses_norms and self.q_norm is not None and self.k_norm is not None:
            q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions, step.rotations)
        elif not self._rotates_first:
            self._rotate(heads, step)
        return self.attn(q, k, v, step).flatten(1)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        heads = b.scratch("heads", sum(self.qkv.sizes) * 4)
        limited = STORED if self.clip is None else Results(function=Function.CLIP, limit=self.clip)
        self.qkv.emit_after_norm(b, norm, heads, limited)
        queries, keys, values = (count * self.head_dim for count in self.head_counts)
        if self.v_norm is not None:
            self.v_norm.emit_in_place(b, heads, queries + keys, values)
        if not self._fuses_norms and not self._rotates_first:
            for own, begin, count in ((self.q_norm, 0, queries), (self.k_norm, queries, keys)):
                if own is not None:
                    own.emit_in_place(b, heads, begin, count)
        tempered = None if self.temperature is None else self.temperature.in_program
        norms = self._weights() if self._rotates_first else self._norms()
        self.attn.emit(b, heads, output, dtype, norms, self.rope.cos_sin, tempered, rotates_first=self._rotates_first)
        if self.gate is not None:
            gates = b.scratch("attention gates", self.gate.matrix.rows * 4)
            self.gate.emit_after_norm(b, norm, gates)
            gate_by_sigmoid(b, gates, output, DTYPES[dtype], sum(self.gate.sizes), self._gated_channels)

    def _rotate(self, heads: Tensor, step: StepInput) -> None:
        """Rotate queries and keys in place."""
        if self.rope.spec.rotary_dim:
            self.rope.joint(heads[:, : -self.head_counts[2]], step.positions, step.rotations)

    def _normalize(self, heads: Tensor) -> None:
        """Normalize queries and keys in place."""
        q, k, _ = heads.split(self.head_counts, dim=1)
        for part, norm in ((q, self.q_norm), (k, self.k_norm)):
            if norm is not None:
                whole = norm.size != self.head_dim
                part.copy_(norm(part.flatten(1)).view_as(part) if whole else norm(part))

    def _norms(self) -> Norms | None:
        """Return the norms that the backend computes before it rotates."""
        return self._weights() if self._fuses_norms else None

    def _weights(self) -> Norms | None:
        """Return the norms of heads in the form that kernels take; None if there are none."""
        if self.q_norm is None or self.k_norm is None:
            return None
        assert isinstance(self.q_norm, RMSNorm)
        assert isinstance(self.k_norm, RMSNorm)
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
