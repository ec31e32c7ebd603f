"""A decoder as a native program: the same model, run by Octavo's C++ kernels in one call a step.

It stands in for the `CausalLM` that it is made from, whose weights it takes over in packed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.core.spans import Spans
from octavo.models.decoder import CausalLM, DecoderLayer
from octavo.models.native_weights import LayerWeights, Matrix, layer_weights, matrix_of, norm_of, table_of
from octavo.models.spec import DecoderSpec
from octavo.native.bindings import Decode, Dtype, Epilogue, Step
from octavo.native.program import ATTENDED, LOGITS, RESIDUAL, Pool, Program, ProgramBuilder, row_bytes
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.native import CACHE_DTYPES, DTYPES
from octavo.nn.embedding import TiedHead
from octavo.nn.quant.panels import PANEL
from octavo.nn.step import StepInput


def reason_against(spec: DecoderSpec) -> str | None:
    """Why the kernels can't run a model of this shape; None if they can."""
    for what, size in (("hidden_size", spec.hidden_size), ("intermediate_size", spec.intermediate_size)):
        if size % PANEL:
            return f"{what} must be a multiple of {PANEL}, not {size}"
    return None


WEIGHT_NAMES = {
    Dtype.FLOAT: "float32",
    Dtype.BFLOAT: "bfloat16",
    Dtype.INT8: "8-bit integers",
    Dtype.INT4: "4-bit integers",
}
PLANES = {"int16": 2, "int8": 1, "bfloat16": 0}
"""Bytes of activations as integers, by what meets weights which stay integers; 0: they don't become any."""


@dataclass(slots=True)
class _Buffers:
    """Ids of the program's buffers: what norms put out, heads before and after rope, attention's and the gate's output,
    and the last two in the form that integer weights take."""

    normed: int
    heads: int
    queries: int
    attended: int
    gated: int
    rounded: int


@dataclass(slots=True)
class _Compiled:
    """A program and the KV caches that its operations point to, which it keeps alive.

    From operation `rest_from` on, behind the last layer's attention, no token looks at another.
    """

    program: Program
    caches: list[Tensor]
    rest_from: int
    head_from: int
    end: int
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    attended: Tensor = field(default_factory=lambda: torch.empty(0))
    residual: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the steps that `decode` computes."""


class NativeDecoder:
    """`CausalLM` to the runner.

    Attributes:
        attention_layers: the model's own; the worker binds each one's `cache`, and may bind another later.
        adoptions: how often it was given other weights, whereafter no batch is laid out.
    """

    def __init__(self, model: CausalLM, pool: Pool, activation_dtype: str = "int16") -> None:
        """`activation_dtype`, "int16", "int8" or "bfloat16", is that of what meets weights which stay integers."""
        self.spec = model.spec
        self.attention_layers = model.attention_layers
        self._pool = pool
        self._activation_dtype, self._planes = activation_dtype, PLANES[activation_dtype]
        self._dtype = DTYPES[model.embedding.dtype]
        self._eps = model.spec.rms_norm_eps
        self._cos_sin = model.rope.cos_sin
        self._layers = [layer_weights(layer) for layer in model.layers if isinstance(layer, DecoderLayer)]
        self._norm = norm_of(model.norm)
        self._head = matrix_of(model.head)
        self._tied = isinstance(model.head, TiedHead)
        self._table = self._head if self._tied else table_of(model.embedding)
        self._compiled: _Compiled | None = None
        self.adoptions = 0

    @property
    def weight_form(self) -> str:
        """How the matrices are stored, in words."""
        names = " and ".join(WEIGHT_NAMES[dtype] for dtype in sorted(self._stored))
        return f"{names}, multiplied with {self._activation_dtype} activations" if self.has_integers else names

    @property
    def has_integers(self) -> bool:
        """Whether some matrices are stored as integers."""
        return bool({Dtype.INT4, Dtype.INT8} & self._stored)

    @property
    def _stored(self) -> set[Dtype]:
        return {m.dtype for layer in self._layers for m in layer.matrices} | {self._head.dtype}

    @property
    def nbytes(self) -> int:
        """Of the weights, tables included."""
        own = [*self._layers, self._head, *([] if self._tied else [self._table])]
        return sum(weights.nbytes for weights in own) + self._norm.nbytes + self._cos_sin.nbytes

    def embed(self, step: StepInput) -> Tensor:
        """[T, hidden_size] float32: the embeddings of `step.input_ids`."""
        x = torch.empty(step.num_tokens, self.spec.hidden_size)
        self._run(0, 1, step.attn, x)
        return x

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """[T, hidden_size] float32 to the same before the final norm, in place, or to [S, hidden_size] of
        `step.hidden_rows`. Reads and writes the KV caches."""
        hidden = x.contiguous()
        if any(layer.cache is not bound for layer, bound in self._bound(self._program)):
            self._compiled = None
        compiled, rows = self._program, step.hidden_rows
        if compiled.attended.shape[0] < hidden.shape[0]:
            compiled.attended = torch.empty(hidden.shape[0], self._query_width)
        if rows is None:
            self._run(1, compiled.head_from, step.attn, hidden)
            return hidden
        self._run(1, compiled.rest_from, step.attn, hidden)
        hidden = hidden[rows]
        if len(rows):
            compiled.attended[: len(rows)] = compiled.attended[rows]
            self._run(compiled.rest_from, compiled.head_from, Step(tokens=len(rows)), hidden)
        return hidden

    def final(self, hidden: Tensor) -> Tensor:
        """The final norm: [S, hidden_size] to the same, float32."""
        return F.rms_norm(hidden, self._norm.shape, self._norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of the chosen rows: [S, hidden_size] to [S, vocab_size] float32.

        The memory is used again by the next call.
        """
        compiled = self._program
        rows = hidden.shape[0]
        self._make_room(compiled, rows)
        self._run(compiled.head_from, compiled.end, Step(tokens=rows), hidden.contiguous())
        return compiled.logits[:rows, : self.spec.vocab_size]

    def lay_out(self, batch: Decode) -> Tensor:
        """Get ready to `decode` a batch, any number of times until another step is computed.

        Returns where its logits will be, like those of `logits`.
        """
        compiled = self._program
        rows = batch.count
        self._make_room(compiled, rows)
        if compiled.residual.shape[0] < rows:
            compiled.residual = torch.empty(rows, self.spec.hidden_size)
        if compiled.attended.shape[0] < rows:
            compiled.attended = torch.empty(rows, self._query_width)
        self._bind(batch, compiled.residual)
        batch.logit_stride, batch.columns, batch.operations = self._logits_width, self.spec.vocab_size, compiled.end
        return compiled.logits[:rows, : self.spec.vocab_size]

    def decode(self, batch: Decode) -> int:
        """A step of one token for each of `batch.count` slots, from their embedding to the most likely next token.

        Only for slots whose earlier tokens went through `forward`, which sees to it that the KV caches are the bound
        ones. Returns how many rows have no logits that can be used.
        """
        return self._program.program.decode(batch)

    def _make_room(self, compiled: _Compiled, rows: int) -> None:
        if compiled.logits.shape[0] < rows:
            compiled.logits = torch.empty(rows, self._logits_width)

    @property
    def _query_width(self) -> int:
        return self.spec.num_heads * self.spec.head_dim

    @property
    def _logits_width(self) -> int:
        return -(-self.spec.vocab_size // PANEL) * PANEL

    def _run(self, first: int, last: int, batch: Step, residual: Tensor) -> None:
        self._bind(batch, residual)
        self._program.program.run(first, last, batch)

    def _bind(self, batch: Step | Decode, residual: Tensor) -> None:
        compiled = self._program
        batch.external[RESIDUAL] = residual.data_ptr()
        batch.external[LOGITS] = compiled.logits.data_ptr()
        batch.external[ATTENDED] = compiled.attended.data_ptr()

    def adopt(self, other: NativeDecoder) -> None:
        """Take over the weights of another of the same make, which is not to be used any more."""
        self._layers, self._norm = other._layers, other._norm
        self._head, self._table = other._head, other._table
        self._compiled = None
        self.adoptions += 1

    def watch(self, spans: Spans) -> None:
        """Have a profile see the kernels."""
        self._program.program.watch(spans)

    def forget_caches(self) -> None:
        """Let go of the KV caches; the next step finds those that are bound then."""
        self._compiled = None

    @property
    def _program(self) -> _Compiled:
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled

    def _bound(self, compiled: _Compiled) -> Iterator[tuple[PagedAttention, Tensor]]:
        return zip(self.attention_layers, compiled.caches, strict=True)

    def _compile(self) -> _Compiled:
        spec = self.spec
        query_width = self._query_width
        b = ProgramBuilder.make(spec.hidden_size * 4, self._logits_width * 4, self._planes, query_width * 4)
        buffers = _Buffers(
            normed=b.buffer(spec.hidden_size * 4),
            heads=b.buffer((query_width + 2 * spec.num_kv_heads * spec.head_dim) * 4),
            queries=b.buffer(query_width * 4),
            attended=b.buffer(query_width * 4),
            gated=b.buffer(spec.intermediate_size * 4),
            rounded=b.buffer(row_bytes(self._rounded_to, max(query_width, spec.intermediate_size), self._planes)),
        )
        table = self._table
        packed = self._tied or table.is_integers
        b.embed(
            table.weight.data_ptr(),
            table.dtype,
            spec.hidden_size,
            RESIDUAL,
            packed=packed,
            zero_point=table.zero_point,
            minima=table.minima,
        )
        last = len(self._layers) - 1
        rest_from = 0
        for i, (layer, attention) in enumerate(zip(self._layers, self.attention_layers, strict=True)):
            at = replace(buffers, attended=ATTENDED) if i == last else buffers
            self._emit_attention(b, at, layer, attention)
            rest_from = len(b.ops)
            self._emit_rest(b, at, layer)
        head_from = len(b.ops)
        self._emit_normed(b, buffers, self._norm, self._head, LOGITS)
        caches = [attention.cache for attention in self.attention_layers]
        return _Compiled(Program(self._pool, b.ops, b.widths), caches, rest_from, head_from, len(b.ops))

    def _emit_attention(self, b: ProgramBuilder, at: _Buffers, layer: LayerWeights, attention: PagedAttention) -> None:
        spec, dtype, cache = self.spec, self._dtype, attention.cache.data_ptr()
        cache_dtype = CACHE_DTYPES[attention.cache.dtype]
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        norms = tuple(0 if norm is None else norm.data_ptr() for norm in (layer.q_norm, layer.k_norm))
        self._emit_normed(b, at, layer.input_norm, layer.qkv, at.heads)
        table, rotary_dim = self._cos_sin.data_ptr(), spec.rope.rotary_dim
        b.rope(
            at.heads,
            at.queries,
            dtype,
            heads,
            rotary_dim,
            table,
            cache,
            cache_dtype=cache_dtype,
            norms=(norms[0], norms[1]),
            eps=self._eps,
        )
        scale, window = attention.spec.scale, attention.spec.window or 0
        b.attend(at.queries, at.attended, dtype, heads, cache, scale, cache_dtype=cache_dtype, window=window)

    def _emit_rest(self, b: ProgramBuilder, at: _Buffers, layer: LayerWeights) -> None:
        """What follows attention."""
        _linear(b, layer.out, self._rounded(b, at, layer.out, at.attended, self._dtype), RESIDUAL, Epilogue.ADD)
        gated = Dtype.BFLOAT if self._inputs(layer.down) is Dtype.BFLOAT else Dtype.FLOAT
        self._emit_normed(b, at, layer.post_norm, layer.gate_up, at.gated, Epilogue.GATE, gated)
        _linear(b, layer.down, self._rounded(b, at, layer.down, at.gated, gated), RESIDUAL, Epilogue.ADD)

    def _emit_normed(
        self,
        b: ProgramBuilder,
        at: _Buffers,
        norm: Tensor,
        matrix: Matrix,
        output: int,
        epilogue: Epilogue = Epilogue.STORE,
        gated: Dtype = Dtype.FLOAT,
    ) -> None:
        """The residual stream, normalized, times the matrix."""
        size, address = self.spec.hidden_size, norm.data_ptr()
        b.norm(RESIDUAL, at.normed, self._inputs(matrix), size, address, self._eps, zero_point=matrix.zero_point)
        _linear(b, matrix, at.normed, output, epilogue, gated)

    def _inputs(self, matrix: Matrix) -> Dtype:
        """How the activations that a matrix multiplies are stored."""
        if not matrix.is_integers:
            return matrix.dtype
        return self._rounded_to

    @property
    def _rounded_to(self) -> Dtype:
        """The form of activations that integer weights meet."""
        return Dtype.INT8 if self._planes else Dtype.BFLOAT

    def _rounded(self, b: ProgramBuilder, at: _Buffers, matrix: Matrix, source: int, dtype: Dtype) -> int:
        """Where `source`, stored as `dtype`, stands in the form that the matrix multiplies."""
        if not matrix.is_integers or self._inputs(matrix) is dtype:
            return source
        b.quantize(source, at.rounded, dtype, matrix.columns, zero_point=matrix.zero_point)
        return at.rounded


def _linear(
    b: ProgramBuilder,
    matrix: Matrix,
    source: int,
    output: int,
    epilogue: Epilogue = Epilogue.STORE,
    gated: Dtype = Dtype.FLOAT,
) -> None:
    b.linear(
        source,
        output,
        matrix.dtype,
        matrix.rows,
        matrix.columns,
        matrix.weight.data_ptr(),
        epilogue=epilogue,
        bias=0 if matrix.bias is None else matrix.bias.data_ptr(),
        zero_point=matrix.zero_point,
        minima=matrix.minima,
        gated=gated,
    )
