"""`PackedExperts`: the weights of a layer's experts in the CPU kernels' format, and their part of a native program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.native.bindings import Dtype, Epilogue, Function
from octavo.native.builder import ProgramBuilder, Results, activated, row_bytes
from octavo.native.experts import ExpertAdditions, ExpertProducts, ExpertsArgs, Scores, emit_experts
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.quant.packed import Matrix, packed


class Beside(NamedTuple):
    """What is added to the experts' sum in a native program.

    Attributes:
        shared: the buffer of the shared expert's output, float32 [T, hidden_size]; -1 without one.
        gate: the buffer whose first column's sigmoid multiplies it, float32 [T, ...]; -1 without one.
    """

    shared: int = -1
    gate: int = -1


def routing_args(
    spec: RoutingSpec, count: int, correction: Tensor | None, beside: Beside, scales: Tensor | None = None
) -> ExpertsArgs:
    """Return the arguments of `emit_experts` for choosing among `count` experts; `correction` and `scales`, float32
    [count], must outlive them."""
    return ExpertsArgs(
        count=count,
        top_k=spec.top_k,
        scores=Scores[spec.scores.upper()],
        correction=0 if correction is None else correction.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(),
        groups=spec.groups,
        top_groups=spec.top_groups,
        group_best=2 if spec.group_score == "top2" else 1,
        normalized=int(spec.normalized),
        on_inputs=int(spec.on_inputs),
        floor=spec.floor,
        scaling=spec.scaling,
        jitter=spec.jitter,
        shared=beside.shared,
        shared_gate=beside.gate,
    )


class PackedExperts:
    """Matrices of each expert, which may be stored in different formats.

    Attributes:
        form: what the experts compute.
        expand, reduce: of the products before and after the activation.
    """

    def __init__(self, form: ExpertsForm, gate_ups: Sequence[object], downs: Sequence[object]) -> None:
        """Move the weights of these schemes, one of each kind per expert; the schemes keep none."""
        self.form = form
        self.expand: list[Matrix] = [packed(scheme, paired=form.gated) for scheme in gate_ups]
        self.reduce: list[Matrix] = [packed(scheme) for scheme in downs]

    @property
    def dtypes(self) -> set[Dtype]:
        return {matrix.dtype for matrix in (*self.expand, *self.reduce)}

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in (*self.expand, *self.reduce))

    def emit(
        self,
        b: ProgramBuilder,
        args: ExpertsArgs,
        logits: int,
        source: int,
        output: int,
        *,
        add: float | None = None,
        additions: ExpertAdditions | None = None,
    ) -> None:
        """Add the experts to a native program; see `emit_experts`."""
        rows, dtype, rounds = args.top_k, *self._between(b)
        gathered = b.scratch("experts: gathered", self._row_bytes(b, self.expand), rows)
        inner = b.scratch("experts: inner", -(-self.form.size // 16) * 64, rows)
        rounded = b.scratch("experts: rounded", self._row_bytes(b, self.reduce), rows) if rounds else inner
        reduced = b.scratch("experts: reduced", self.form.hidden_size * 4, rows)
        first, second = b.inner(), b.inner()
        for matrix in self.expand:
            matrix.emit(first, gathered, inner, self._results(dtype))
        for matrix in self.reduce:
            matrix.emit(second, rounded, reduced)
        for builder, matrices in ((first, self.expand), (second, self.reduce)):
            for op, matrix in zip(builder.ops, matrices, strict=True):
                op.third = 0 if matrix.order is None else matrix.order.data_ptr()
        products = ExpertProducts(
            first, second, gathered, inner, rounded, reduced, self.form.hidden_size, self.reduce[0].columns, dtype
        )
        args.first = self.form.owned.start
        emit_experts(b, args, products, logits, source, output, add=add, additions=additions)

    def _between(self, b: ProgramBuilder) -> tuple[Dtype, bool]:
        """Return the dtype of the inner values, and whether they must be rounded or reordered before the second
        product."""
        met = {b.meets(matrix.dtype) for matrix in self.reduce}
        if len(met) == 1 and Dtype.INT8 not in met and all(matrix.order is None for matrix in self.reduce):
            return met.pop(), False
        return Dtype.FLOAT, True

    def _results(self, dtype: Dtype) -> Results:
        clamped = self.form.clamped
        if clamped is None:
            return activated(self.form.activation, dtype, gated=self.form.gated)
        return Results(Epilogue.GATE, dtype, Function.CLAMPED_GATE, clamped.alpha, clamped.limit)

    def _row_bytes(self, b: ProgramBuilder, matrices: Sequence[Matrix]) -> int:
        return max(row_bytes(b.meets(matrix.dtype), matrix.columns, b.planes) for matrix in matrices)
