"""A decoder as a native program: the same model, run by Octavo's C++ kernels in one call a step.

It stands in for the `CausalLM` that it is made from, whose weights it takes over in packed form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from octavo.models.decoder import CausalLM, DecoderLayer
from octavo.native.library import Dtype, Epilogue, Step
from octavo.native.program import LOGITS, RESIDUAL, Pool, Program, ProgramBuilder
from octavo.nn.attention.native import DTYPES
from octavo.nn.embedding import TiedHead
from octavo.nn.linear import Linear
from octavo.nn.norm import RMSNorm
from octavo.nn.quant.none import Unquantised
from octavo.nn.quant.panels import PANEL, interleave, pack, pad_bias
from octavo.nn.step import StepInput


def reason_against(model: CausalLM) -> str | None:
    """Why the kernels can't run this model; None if they can."""
    spec = model.spec
    for what, size in (("hidden_size", spec.hidden_size), ("intermediate_size", spec.intermediate_size)):
        if size % PANEL:
            return f"{what} must be a multiple of {PANEL}, not {size}"
    return None


@dataclass(slots=True)
class Matrix:
    """A linear layer's weights as the kernels want them. `rows` counts outputs, `columns` inputs."""

    dtype: Dtype
    rows: int
    columns: int
    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(slots=True)
class _Buffers:
    """Ids of the program's buffers: what norms put out, heads before and after rope, attention's and the gate's."""

    normed: int
    heads: int
    queries: int
    attended: int
    gated: int


@dataclass(slots=True)
class _Compiled:
    program: Program
    head_from: int
    end: int
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class NativeDecoder:
    """`CausalLM` to the runner. The KV caches must be bound before the first step.

    Attributes:
        attention_layers: the model's own; the worker binds each one's `cache`.
    """

    def __init__(self, model: CausalLM, pool: Pool) -> None:
        self.spec = model.spec
        self.attention_layers = model.attention_layers
        self._pool = pool
        self._dtype = DTYPES[model.embedding.dtype]
        self._itemsize = model.embedding.dtype.itemsize
        self._eps = model.spec.rms_norm_eps
        self._cos_sin = model.rope.cos_sin
        self._layers = [_pack_layer(layer) for layer in model.layers if isinstance(layer, DecoderLayer)]
        self._norm = _norm(model.norm)
        self._table, self._head = _pack_ends(model)
        self._compiled: _Compiled | None = None

    def embed(self, step: StepInput) -> Tensor:
        """[T, hidden_size] float32: `step.embeds` if given, else the embeddings of `step.input_ids`."""
        if step.embeds is not None:
            return step.embeds.float()
        x = torch.empty(step.num_tokens, self.spec.hidden_size)
        self._run(0, 1, step.attn, x)
        return x

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """[T, hidden_size] float32 to the same, before the final norm. Reads and writes the KV caches."""
        hidden = x.clone(memory_format=torch.contiguous_format)
        self._run(1, self._program().head_from, step.attn, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of the chosen rows: [S, hidden_size] to [S, vocab_size] float32.

        The memory is used again by the next call.
        """
        compiled = self._program()
        rows, width = hidden.shape[0], -(-self.spec.vocab_size // PANEL) * PANEL
        if compiled.logits.shape[0] < rows:
            compiled.logits = torch.empty(rows, width)
        self._run(compiled.head_from, compiled.end, Step(tokens=rows), hidden.contiguous())
        return compiled.logits[:rows, : self.spec.vocab_size]

    def _run(self, first: int, last: int, batch: Step, residual: Tensor) -> None:
        compiled = self._program()
        batch.external[RESIDUAL] = residual.data_ptr()
        batch.external[LOGITS] = compiled.logits.data_ptr()
        compiled.program.run(first, last, batch)

    def _program(self) -> _Compiled:
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> _Compiled:
        spec, size = self.spec, self._itemsize
        width = -(-spec.vocab_size // PANEL) * PANEL
        b = ProgramBuilder.make(spec.hidden_size * 4, width * 4)
        query_width = spec.num_heads * spec.head_dim
        buffers = _Buffers(
            normed=b.buffer(spec.hidden_size * size),
            heads=b.buffer((query_width + 2 * spec.num_kv_heads * spec.head_dim) * 4),
            queries=b.buffer(query_width * size),
            attended=b.buffer(query_width * size),
            gated=b.buffer(spec.intermediate_size * size),
        )
        packed = self._table is self._head.weight
        b.embed(self._table.data_ptr(), self._dtype, spec.hidden_size, RESIDUAL, packed=packed)
        for layer, attention in zip(self._layers, self.attention_layers, strict=True):
            self._emit(b, buffers, layer, attention.cache, attention.spec.window or 0)
        head_from = len(b.ops)
        b.norm(RESIDUAL, buffers.normed, self._dtype, spec.hidden_size, self._norm.data_ptr(), self._eps)
        _linear(b, self._head, buffers.normed, LOGITS)
        return _Compiled(Program(self._pool, b.ops, b.widths), head_from, len(b.ops))

    def _emit(self, b: ProgramBuilder, at: _Buffers, layer: _Layer, cache: Tensor, window: int) -> None:
        spec, dtype = self.spec, self._dtype
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        norms = (_address(layer.q_norm), _address(layer.k_norm))
        b.norm(RESIDUAL, at.normed, dtype, spec.hidden_size, layer.input_norm.data_ptr(), self._eps)
        _linear(b, layer.qkv, at.normed, at.heads)
        table, rotary_dim = self._cos_sin.data_ptr(), spec.rope.rotary_dim
        b.rope(at.heads, at.queries, dtype, heads, rotary_dim, table, cache.data_ptr(), norms=norms, eps=self._eps)
        b.attend(at.queries, at.attended, dtype, heads, cache.data_ptr(), spec.head_dim**-0.5, window=window)
        _linear(b, layer.out, at.attended, RESIDUAL, Epilogue.ADD)
        b.norm(RESIDUAL, at.normed, dtype, spec.hidden_size, layer.post_norm.data_ptr(), self._eps)
        _linear(b, layer.gate_up, at.normed, at.gated, Epilogue.GATE)
        _linear(b, layer.down, at.gated, RESIDUAL, Epilogue.ADD)


def _linear(b: ProgramBuilder, matrix: Matrix, source: int, output: int, epilogue: Epilogue = Epilogue.STORE) -> None:
    b.linear(
        source,
        output,
        matrix.dtype,
        matrix.rows,
        matrix.columns,
        matrix.weight.data_ptr(),
        epilogue=epilogue,
        bias=_address(matrix.bias),
    )


def _pack_layer(layer: DecoderLayer) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    return _Layer(
        input_norm=_norm(layer.input_norm),
        qkv=_matrix(attention.qkv),
        q_norm=None if attention.q_norm is None else _norm(attention.q_norm),
        k_norm=None if attention.k_norm is None else _norm(attention.k_norm),
        out=_matrix(attention.out),
        post_norm=_norm(layer.post_norm),
        gate_up=_matrix(mlp.gate_up, paired=True),
        down=_matrix(mlp.down),
    )


def _pack_ends(model: CausalLM) -> tuple[Tensor, Matrix]:
    """The embedding table and the head; if they are tied, one packed matrix is both."""
    head = model.head
    if isinstance(head, TiedHead):
        matrix = _matrix(head)
        model.embedding.weight = torch.empty(0)
        return matrix.weight, matrix
    return model.embedding.weight, _matrix(head)


def _matrix(layer: nn.Module, *, paired: bool = False) -> Matrix:
    """A layer's weights, taken from it; `paired` puts the panels of its two parts in turns, for the gate."""
    assert isinstance(layer, Linear | TiedHead)
    assert isinstance(layer.scheme, Unquantised)
    scheme = layer.scheme
    weight, bias = scheme.weight, scheme.bias
    assert weight is not None, "weights are not loaded"
    rows, columns = weight.shape
    panels, padded = pack(weight), None if bias is None else pad_bias(bias)
    if paired:
        panels = interleave(*panels.chunk(2))
        padded = None if padded is None else interleave(*padded.chunk(2))
    scheme.weight = scheme.bias = None
    return Matrix(DTYPES[weight.dtype], rows, columns, panels, padded)


def _norm(layer: RMSNorm) -> Tensor:
    return layer.weight.float().contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
