"""`NativeDecoder`: a decoder, or a stage of one, run by Octavo's C++ kernels, in one call per step.

The model's layers emit the operations (their `emit` methods); this class runs them in the methods of `CausalLM`. The
program of a stage of a pipeline has its layers, the first one's also the embeddings, the last one's the head. Models of
other classes run, too, if they are `Emitting`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.core.spans import Spans
from octavo.models.decoder import CausalLM, mixed_width
from octavo.models.load.weights import replace_weights, weight_layers
from octavo.models.spec import DecoderSpec
from octavo.native.bindings import Decode, Dtype, StepArgs
from octavo.native.builder import ATTENDED, LOGITS, RESIDUAL, ProgramBuilder
from octavo.native.program import Pool, Program
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.cached import CachedLayer
from octavo.nn.embedding import Embedding
from octavo.nn.experts import ExpertLayer
from octavo.nn.linear import Projection
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.packed import NAMES, Matrix, emit_rounded, in_order
from octavo.nn.quant.panels import PANEL
from octavo.nn.step import StepInput
from octavo.nn.taps import Taps
from octavo.parallel.mesh import ALONE, Mesh

if TYPE_CHECKING:
    from octavo.models.model import ModelSpec


class Emitting(Protocol):
    """A model whose layers emit a native program, such as `CausalLM`.

    Attributes:
        spec: its architecture.
        attention_layers, cached_layers: as those of `CausalLM`.
        layers: those that mark their beginnings in the program, as "layer 0" and so on.
        layer_range: their numbers in `spec`.
        is_last: the program ends with logits.
        entry: [tokens, hidden_size] float32, what the layers begin with in place of embeddings, at a fixed address:
            set before each step. A step that `decode` computes leaves the rows' hidden states there. None if the
            program begins with embeddings.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def attention_layers(self) -> list[PagedAttention]: ...

    @property
    def cached_layers(self) -> Sequence[CachedLayer]: ...

    @property
    def layers(self) -> nn.ModuleList: ...

    @property
    def layer_range(self) -> range: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def entry(self) -> Tensor | None: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def pack(self) -> None:
        """Convert all weights to the CPU kernels' format, for `emit`."""
        ...

    def emit(self, b: ProgramBuilder) -> None:
        """Add the model to a native program. It marks "layers", where `forward` begins, "rest", see `DecoderLayer`, and
        "head", where `logits` begins. Logits that no operation writes are minus infinity."""
        ...

    def final(self, hidden: Tensor) -> Tensor: ...


def emits(model: object) -> TypeGuard[Emitting]:
    """Whether a model has all that `Emitting` names.

    From Python 3.12 on, `isinstance` with a protocol finds no attributes that torch keeps for a module, as `layers`.
    """
    return all(hasattr(model, name) for name in vars(Emitting) if not name.startswith("_"))


def reason_against(spec: ModelSpec, mesh: Mesh = ALONE, *, exchanges_rows: bool = False) -> str | None:
    """Return the reason why the kernels can't run a model of this spec; None if they can.

    Args:
        mesh: the ranks that divide its layers.
        exchanges_rows: ranks send each other single rows.
    """
    if spec.lacking is not None:
        return f"the kernels lack {spec.lacking}"
    if mesh.context is not None:
        return "ranks divide the tokens of its prompts"
    if spec.hidden_size % PANEL:
        return f"hidden_size must be a multiple of {PANEL}, not {spec.hidden_size}"
    return None if mesh.size == 1 else _reason_against_ranks(spec, mesh, exchanges_rows=exchanges_rows)


def _reason_against_ranks(spec: ModelSpec, mesh: Mesh, *, exchanges_rows: bool) -> str | None:
    if not mesh.shares_memory:
        return "it is divided over ranks that share no memory, or several machines"
    if exchanges_rows:
        return "its ranks exchange rows (--all2all-backend all_to_all, or data-parallel attention)"
    if not isinstance(spec, DecoderSpec):
        return "several ranks divide it"
    if spec.head_norms is not None and spec.head_norms.over == "all":
        return "ranks divide what it normalizes together"
    return None


PLANES = {"int16": 2, "int8": 1, "bfloat16": 0}
"""Dtype of activations for integer weights -> bytes of an integer activation; 0 for floating point."""


@dataclass(slots=True)
class _CompiledProgram:
    """A program, and the KV caches that its operations point to.

    Attributes:
        layers_from: the first operation after the look-up of embeddings.
        rest_from: the first operation after the last layer's attention, from where tokens are independent.
        head_from, end: the operations of the final norm and the head.
        layers: the first operation of each layer.
    """

    program: Program
    caches: list[Tensor]
    layers_from: int
    rest_from: int
    head_from: int
    end: int
    layers: list[int]


class NativeDecoder:
    """A `Model` for the runner. Each variant of the layers is a program of its own, compiled when it is first computed;
    all share the weights.

    Attributes:
        source: the model whose layers emit the programs.
        attention_layers: the model's layers with keys and values.
        taps: keeps states of chosen layers; None keeps none.
        adoptions: number of times the weights were replaced; each replacement invalidates laid-out batches.
    """

    def __init__(self, model: Emitting, pool: Pool, activation_dtype: str = "int16") -> None:
        """Pack the model's weights; only this object can compute with them afterwards.

        Args:
            activation_dtype: of activations for integer weights: "int16", "int8" or "bfloat16".
        """
        model.pack()
        self.spec = model.spec
        self.attention_layers = model.attention_layers
        self.adoptions = 0
        self.taps: Taps | None = None
        self.source = model
        self._pool = pool
        self._activation_dtype, self._planes = activation_dtype, PLANES[activation_dtype]
        schemes = (layer.scheme for layer in model.modules() if isinstance(layer, Projection))
        dtypes = {scheme.dtype for scheme in schemes if isinstance(scheme, Unquantized)}
        self._wide = Dtype.BFLOAT if torch.bfloat16 in dtypes else Dtype.FLOAT
        self._variant: Hashable = ()
        self._programs: dict[Hashable, _CompiledProgram] = {}
        self._compiled: _CompiledProgram | None = None
        self._spans: Spans | None = None
        # The external buffers, shared by all programs.
        self._logits, self._attended, self._residual = torch.empty(0), torch.empty(0), torch.empty(0)

    def select(self, variant: Hashable) -> None:
        """Compute this variant from now on; the deltas of its layers are set when it is first computed."""
        if variant != self._variant:
            self._variant = variant
            self._compiled = self._programs.get(variant)

    @property
    def cached_layers(self) -> Sequence[CachedLayer]:
        """The layers whose `cache` the worker binds, and may bind to another later."""
        return self.source.cached_layers

    @property
    def weight_form(self) -> str:
        """Storage format of the matrices, for display."""
        names = " and ".join(NAMES[dtype] for dtype in sorted(self._stored))
        return f"{names}, multiplied with {self._activation_dtype} activations" if self.has_integers else names

    @property
    def has_integers(self) -> bool:
        """Whether some matrices are stored as integers."""
        return bool({Dtype.INT4, Dtype.INT8} & self._stored)

    @property
    def _stored(self) -> set[Dtype]:
        matrices = (layer.matrix for layer in self.source.modules() if isinstance(layer, Projection))
        experts = (layer.packed for layer in self.source.modules() if isinstance(layer, ExpertLayer))
        return {matrix.dtype for matrix in matrices}.union(*(one.dtypes for one in experts))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, tables included."""
        return sum(layer.nbytes for layer in weight_layers(self.source))

    def embed(self, step: StepInput) -> Tensor:
        """Return the embeddings of `step.input_ids`, [T, hidden_size] float32; a copy of the model's `entry`, if it has
        that."""
        if self.source.entry is not None:
            return self.source.entry[: step.num_tokens].clone()  # `forward` changes them
        x = torch.empty(step.num_tokens, self.spec.hidden_size)
        self._run(0, self._program.layers_from, step.attn, x)
        return x

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """Run the layers on x [T, hidden_size] float32, in place; return the states before the final norm:
        [T, hidden_size], or [S, hidden_size] of `step.hidden_rows`. Reads and writes the KV caches."""
        hidden = x.contiguous()
        self._rotate(step)
        if any(layer.cache is not bound for layer, bound in self._bound(self._program)):
            self.forget_caches()
        compiled, rows = self._program, step.hidden_rows
        if self._attended.shape[0] < hidden.shape[0]:
            self._attended = torch.empty(hidden.shape[0], self._mixed_width)
        begin = self._run_interrupted(compiled, step, hidden)
        if rows is None:
            self._run(begin, compiled.head_from, step.attn, hidden)
        else:
            self._run(begin, compiled.rest_from, step.attn, hidden)
            hidden = hidden[rows]
            if len(rows):
                self._attended[: len(rows)] = self._attended[rows]
                self._run(compiled.rest_from, compiled.head_from, StepArgs(tokens=len(rows), of_logits=1), hidden)
        if step.additions and (added := step.addition(self.source.layer_range.stop - 1, rows)) is not None:
            hidden += added
        return hidden

    def _rotate(self, step: StepInput) -> None:
        """Have the kernels read a row of rotations for each token, if some of their positions differ along axes."""
        shifts = step.axis_shifts
        if shifts is None or not shifts.any():
            return
        assert isinstance(self.source, CausalLM), "only decoders have positions along several axes"
        step.rotations = self.source.rotations(step.positions, shifts)  # kept here, since the kernels read it
        step.attn.rotations = step.rotations.data_ptr()

    def _run_interrupted(self, compiled: _CompiledProgram, step: StepInput, hidden: Tensor) -> int:
        """Run the layers up to the last place of `taps` and of additions between layers, and keep and add states there;
        return the next operation."""
        begin, own = compiled.layers_from, self.source.layer_range
        kept = () if self.taps is None else self.taps.places
        added = range(own.start + 1, min(own.stop, len(step.additions) + 1)) if step.additions else ()
        for place in sorted({*kept, *added}):
            number = place - own.start
            end = compiled.layers[number] if number < len(compiled.layers) else compiled.head_from
            self._run(begin, end, step.attn, hidden)
            if place in added:
                hidden += step.additions[place - 1]
            if self.taps is not None and place in kept:
                self.taps.keep(place, hidden)
            begin = end
        return begin

    def final(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: [S, hidden_size] to the same shape, float32."""
        return self.source.final(hidden)

    def classify(self, pooled: Tensor) -> Tensor:
        """Return the classification head's outputs: [R, hidden_size] to [R, labels]."""
        assert isinstance(self.source, CausalLM)
        return self.source.classify(pooled)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head: [S, hidden_size] to [S, vocab_size] float32.

        The next call reuses the memory of the result.
        """
        compiled = self._program
        rows = hidden.shape[0]
        self._make_room(rows)
        self._run(compiled.head_from, compiled.end, StepArgs(tokens=rows, of_logits=1), hidden.contiguous())
        return self._logits[:rows, : self.spec.vocab_size]

    def product(self, matrix: Matrix, x: Tensor, *, paired: bool) -> Tensor:
        """Return x [T, in] float32 times one of the model's matrices, plus its bias, by the program's kernels: [T, out]
        float32.

        Args:
            paired: the matrix was packed so (`packed` in `nn/quant/packed.py`).
        """
        if x.shape[1] < matrix.columns:
            x = F.pad(x, (0, matrix.columns - x.shape[1]))
        y = torch.empty(len(x), len(matrix.weight) * PANEL)
        b = ProgramBuilder.make(matrix.columns * 4, y.shape[1] * 4, self._planes)
        b.wide = self._wide
        matrix.emit(b, emit_rounded(b, matrix, RESIDUAL, Dtype.FLOAT), LOGITS)
        step, x = StepArgs(tokens=len(x)), x.contiguous()
        step.external[RESIDUAL], step.external[LOGITS] = x.data_ptr(), y.data_ptr()
        Program(self._pool, b).run(0, len(b.ops), step)
        return in_order(matrix, y, paired=paired)

    def lay_out(self, batch: Decode) -> Tensor:
        """Prepare to `decode` a batch any number of times, until another step is computed.

        Returns:
            The buffer of its logits, [S, vocab_size] float32; before the last stage of a pipeline, that of its hidden
            states, [S, hidden_size] float32.
        """
        rows = batch.results
        if self.source.entry is not None:
            self._residual = self.source.entry
        elif self._residual.shape[0] < rows:
            self._residual = torch.empty(rows, self.spec.hidden_size)
        if self._attended.shape[0] < rows:
            self._attended = torch.empty(rows, self._mixed_width)
        if self.samples:
            self._make_room(rows)
        self._bind(batch, self._residual)
        batch.logit_stride, batch.columns = self._logits_width, self.spec.vocab_size if self.samples else 0
        batch.operations = self._program.end
        return self._logits[:rows, : self.spec.vocab_size] if self.samples else self._residual[:rows]

    def decode(self, batch: Decode) -> int:
        """Compute a step of one token, and its drafts, for each of `batch.count` slots, from embedding to token, or the
        part of a stage of a pipeline.

        Only for slots whose earlier tokens were computed by `forward`, which binds the KV caches.

        Returns:
            The number of tokens without usable logits.
        """
        flawed = self._program.program.decode(batch)
        if self.taps is not None:
            self.taps.keep(self.spec.num_layers, self._residual[: batch.results])
        return flawed

    @property
    def samples(self) -> bool:
        """Whether `decode` draws tokens: stages of a pipeline before the last one have no logits."""
        return self.source.is_last

    @property
    def decodes(self) -> bool:
        """Whether `decode` keeps all states that `taps` asks for: those of the last layer."""
        return self.taps is None or self.taps.places == (self.spec.num_layers,)

    def _make_room(self, rows: int) -> None:
        if self._logits.shape[0] < rows:
            self._logits = torch.full((rows, self._logits_width), float("-inf"))

    @property
    def _mixed_width(self) -> int:
        return mixed_width(self.source.layers)

    @property
    def _logits_width(self) -> int:
        return -(-self.spec.vocab_size // PANEL) * PANEL

    def _run(self, first: int, last: int, batch: StepArgs, residual: Tensor) -> None:
        self._bind(batch, residual)
        self._program.program.run(first, last, batch)

    def _bind(self, batch: StepArgs | Decode, residual: Tensor) -> None:
        batch.external[RESIDUAL] = residual.data_ptr()
        batch.external[LOGITS] = self._logits.data_ptr()
        batch.external[ATTENDED] = self._attended.data_ptr()

    def adopt(self, other: NativeDecoder) -> None:
        """Take over the weights of another decoder of the same spec, which must not be used any more. The layers stay:
        they may have deltas."""
        replace_weights(self.source, other.source, in_place=False)
        for mine, its in zip(weight_layers(self.source), weight_layers(other.source), strict=True):
            if isinstance(mine, Projection | ExpertLayer | Embedding):
                mine.take_packed(its)
        self.forget_caches()
        self.adoptions += 1

    def watch(self, spans: Spans) -> None:
        """Record the kernels in a profile's spans."""
        if not self._programs:
            self._programs[self._variant] = self._compiled = self._compile()
        for compiled in self._programs.values():
            compiled.program.watch(spans)
        self._spans = spans  # of programs compiled until then, too
        spans.at_release(self._unwatch)

    def _unwatch(self) -> None:
        self._spans = None

    def forget_caches(self) -> None:
        """Drop the programs, which refer to the KV caches; the next step uses those bound then."""
        self._programs.clear()
        self._compiled = None

    @property
    def _program(self) -> _CompiledProgram:
        """The program of the selected variant."""
        if self._compiled is None:
            self._compiled = self._programs[self._variant] = self._compile()
        return self._compiled

    def _bound(self, compiled: _CompiledProgram) -> Iterator[tuple[CachedLayer, Tensor]]:
        return zip(self.cached_layers, compiled.caches, strict=True)

    def _compile(self) -> _CompiledProgram:
        mixed_width = self._mixed_width
        b = ProgramBuilder.make(self.spec.hidden_size * 4, self._logits_width * 4, self._planes, mixed_width * 4)
        b.wide = self._wide
        self.source.emit(b)
        caches = [layer.cache for layer in self.cached_layers]
        program = Program(self._pool, b)
        if self._spans is not None:
            program.watch(self._spans)
        layers = [b.marks[f"layer {i}"] for i in range(len(self.source.layers))]
        marks = (b.marks["layers"], b.marks["rest"], b.marks["head"], len(b.ops))
        return _CompiledProgram(program, caches, *marks, layers)
