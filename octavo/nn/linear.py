"""Linear layers. Fused projections are one layer's `parts`; storage formats are its `scheme`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.native.bindings import Dtype, Epilogue
from octavo.native.builder import LOGITS, RESIDUAL, STORED, NormArgs, ProgramBuilder, Results
from octavo.nn.delta import Addition, Delta
from octavo.nn.norm import Norm
from octavo.nn.ops.activation import act_mul
from octavo.nn.quant.base import Fusing, Packing, Part, RoundingScheme, Scheme
from octavo.nn.quant.packed import Matrix, emit_rounded, packed
from octavo.nn.quant.panels import PANEL
from octavo.nn.rounded import Activations, Rounded
from octavo.nn.shard import COL, ROW, AnyShard, Cut, cut
from octavo.nn.stream import Begun, Stream
from octavo.nn.weights import Stored, Wanted, WeightLayer
from octavo.parallel.collectives import RankSum
from octavo.parallel.mesh import ALONE, Mesh


class Projection(WeightLayer):
    """y = x @ W^T + b, and a decoder's operations around it. Models call only these methods.

    This class decides whether a norm, a gate or the residual sum is fused into the product's launch: the scheme must
    support it, and there must be no operation in between (a sum over ranks, a delta that can't be fused, too).

    Attributes:
        scheme: stores the weights and multiplies with them.
        delta: an addition to the product, such as a low-rank adapter's; None for none.
    """

    scheme: Scheme
    has_bias = False
    gates = False
    """Whether the outputs are a gate and its operand, concatenated."""
    activation = "silu"
    """Of the gate; see `nn/ops/activation.py`."""

    if TYPE_CHECKING:

        def __call__(self, x: Activations, /) -> Tensor: ...

    def __init__(self, path: str, device: torch.device, scheme: Scheme, mesh: Mesh = ALONE) -> None:
        super().__init__(path, device)
        self.scheme = scheme
        self.mesh = mesh
        self.delta: Delta | None = None
        self._keeps_own = False
        self._fusing_scheme = scheme if isinstance(scheme, Fusing) else None
        self._rounding_scheme = scheme if isinstance(scheme, RoundingScheme) else None
        self._matrix: Matrix | None = None

    def forward(self, x: Activations) -> Tensor:
        """Return x @ W^T + b: [..., in] to [..., out]."""
        if isinstance(x, Rounded):
            assert self._rounding_scheme is not None
            return self._finished(self._rounding_scheme.multiply_rounded(x), None)
        addition = None if self.delta is None else self.delta.begin(x)
        return self._finished(self.scheme.apply(x), addition)

    def wide(self, x: Tensor) -> Tensor:
        """Like `forward`, in float32 if that costs little."""
        addition = None if self.delta is None else self.delta.begin(x)
        return self._finished(self.scheme.wide(x), addition)

    def gated(self, x: Tensor) -> Tensor:
        """Return activation(first half) * second half of the outputs: [T, in] to [T, out / 2]."""
        fusing, delta = self._fusing, self.delta
        if self.activation != "silu":
            return act_mul(self(x), self.activation)
        if delta is not None and self.is_whole:
            addition = delta.begin(x)
            return addition.gated(self.scheme.apply(x)) if fusing is None else fusing.gated(x, addition)
        return act_mul(self(x), self.activation) if fusing is None else fusing.gated(x)

    def after_norm(self, stream: Stream, norm: Norm, *, gated: bool = False, wide: bool = False) -> Tensor:
        """Return `forward` of norm(stream); `gated` and `wide` as the methods of these names."""
        fusing, scale = self._fusing, norm.scale
        if (
            fusing is not None
            and scale is not None
            and stream.settled
            and 0 < stream.rows <= self._fused_rows(fusing)
            and not (gated and (self.has_bias or self.activation != "silu"))
        ):
            dtype = torch.float32 if wide else None
            return fusing.fused(stream.value, norm=scale, gated=gated, dtype=dtype, delta=self.delta)
        rounding = self._rounding(stream.rows)
        if rounding is None or scale is None:
            x = stream.normed(norm)
            return self.gated(x) if gated else self.wide(x) if wide else self(x)
        rounded = stream.normed(rounding.round_norm(*scale))
        y = self._finished(rounding.multiply_rounded(rounded, torch.float32 if wide else None), None)
        return act_mul(y, self.activation) if gated else y

    def own_after_norm(self, stream: Stream, norm: Norm) -> Tensor:
        """Return `after_norm` with `wide`, of this rank's outputs only."""
        self._keeps_own = True
        try:
            return self.after_norm(stream, norm, wide=True)
        finally:
            self._keeps_own = False

    def gated_after_norm(self, stream: Stream, norm: Norm, following: Projection) -> Activations:
        """Return `after_norm` with `gated`, rounded if the projection that follows takes it so."""
        rounding = following._rounding(stream.rows)
        if rounding is None or self._rounding(stream.rows) is None or self.activation != "silu":
            return self.after_norm(stream, norm, gated=True)
        return rounding.round_gated(self.after_norm(stream, norm))

    def rounds_by(self, rows: int) -> Tensor | None:
        """Return the factor of this number of rows, [1] float32, if the operation before may multiply its results by it
        and round them to E4M3, for `Rounded` without scales; None if the projection takes them unrounded."""
        rounding = self._rounding(rows)
        return None if rounding is None else rounding.inverse

    def into(self, stream: Stream, x: Activations) -> None:
        """Add `forward` of x [T, in] to the stream."""
        if isinstance(x, Rounded):
            stream.add_later(self(x))
            return
        fusing = self._fusing
        if fusing is not None and stream.settled:
            if 0 < stream.rows <= self._fused_rows(fusing):
                fusing.fused(x, add_to=stream.writable(), delta=self.delta)
                return
            if self.leaves(stream.dtype):
                if self.delta is not None:
                    self.delta.begin(x).add_to(stream.writable())
                stream.add_parts_later(fusing.leave(stream.writable(), x))
                return
        stream.add_later(self(x))

    def leaves(self, dtype: torch.dtype) -> bool:
        """Return whether the product's own launch can add it to a stream of this dtype, for any number of rows."""
        fusing = self._fusing
        return fusing is not None and fusing.dtype == dtype and not self.has_bias

    def pack(self) -> None:
        """Convert the weights to the CPU kernels' format, for `emit`; the other methods can't be used afterwards."""
        self._matrix = packed(self.scheme, paired=self.gates)

    def take_packed(self, other: WeightLayer) -> None:
        """Take over the packed weights of another layer of this kind, which must not be used any more."""
        assert isinstance(other, Projection)
        self._matrix = other._matrix

    @property
    def holders(self) -> tuple[object, ...]:
        return self, self.scheme

    @property
    def matrix(self) -> Matrix:
        assert self._matrix is not None, "the layer is not packed"
        return self._matrix

    @property
    def packed_as(self) -> str | None:
        """The form in which kernels read the weights, for messages; None if torch multiplies a plain matrix."""
        if self._matrix is not None:
            return self._matrix.form
        return self.scheme.packed_as if isinstance(self.scheme, Packing) else None

    def emit(
        self,
        b: ProgramBuilder,
        source: int,
        given: Dtype,
        output: int,
        results: Results = STORED,
    ) -> None:
        """Add the product of a buffer, whose rows have dtype `given`, to a native program; see
        `ProgramBuilder.linear`."""
        matrix, delta = self.matrix, self.delta
        rounded = emit_rounded(b, matrix, source, given)
        if rounded != source and matrix.is_integers and delta is not None:
            b.run_beside()
        low_rank = None if delta is None else delta.emit(b, source, given, matrix.columns)
        matrix.emit(b, rounded, output, results, low_rank)

    def emit_summed(self, b: ProgramBuilder, source: int, given: Dtype, output: int) -> None:
        """Add `emit` to a native program, with the sum over ranks if the layer has one. The output has whole panels."""
        self.emit(b, source, given, output)
        if self._sums:
            b.all_reduce(output, output, -(-self.matrix.rows // PANEL) * PANEL, self.mesh.exchange)

    def emit_after_norm(
        self, b: ProgramBuilder, norm: Norm, output: int, results: Results = STORED, *, source: int = RESIDUAL
    ) -> None:
        """Add the product of the normalized residual stream, or of other normalized float32 rows, to a native
        program."""
        matrix, normed = self.matrix, b.scratch("normed", norm.size * 4)
        if matrix.order is not None:
            self.emit(b, norm.emit(b, source, normed, Dtype.FLOAT), Dtype.FLOAT, output, results)
            return
        normed = norm.emit(b, source, normed, b.meets(matrix.dtype), matrix.zero_point)
        low_rank = None
        if self.delta is not None:
            if normed != source:
                b.run_beside()
            normalizes = norm.kernel_args() is not None
            low_rank = self.delta.emit(b, source, Dtype.FLOAT, matrix.columns, norm if normalizes else None)
        matrix.emit(b, normed, output, results, low_rank)

    def emit_into(
        self, b: ProgramBuilder, source: int, given: Dtype, norm: Norm | None = None, scale: float = 1.0
    ) -> None:
        """Add the product of a buffer, whose rows have dtype `given`, normalized if there is a norm and times `scale`,
        to the residual stream, in a native program."""
        args = None if norm is None else norm.kernel_args()
        if args is None and not self._sums:
            self.emit(b, source, given, RESIDUAL, Results(Epilogue.ADD, scale=scale))
            return
        product = b.scratch("product", self.matrix.rows * 4)
        self.emit(b, source, given, product)
        emit_sum(b, product, self.matrix.rows, self.mesh if self._sums else ALONE, args, scale)

    def emit_logits(self, b: ProgramBuilder, norm: Norm, results: Results = STORED) -> None:
        """Add the product of the normalized residual stream, with the outputs of all ranks, to a native program: the
        logits."""
        if not self._gathers:
            self.emit_after_norm(b, norm, LOGITS, results)
            return
        own = b.scratch("own logits", -(-self.matrix.rows // PANEL) * PANEL * 4)
        self.emit_after_norm(b, norm, own, results)
        b.all_gather(own, LOGITS, self.matrix.rows, self.mesh.exchange)

    @property
    def _sums(self) -> bool:
        """Whether the products of all ranks must be added up."""
        return False

    @property
    def _gathers(self) -> bool:
        """Whether each rank computes a part of the outputs and all ranks need the whole."""
        return False

    @property
    def _fusing(self) -> Fusing | None:
        return self._fusing_scheme if self.is_whole else None

    def _rounding(self, rows: int) -> RoundingScheme | None:
        """Return the scheme if it multiplies this number of rows in 8 bits, and nothing needs them unrounded."""
        scheme = self._rounding_scheme
        return scheme if scheme is not None and self.delta is None and scheme.takes_rounded(rows) else None

    def _fused_rows(self, fusing: Fusing) -> int:
        """Return the most rows for which `fusing.fused` can compute the layer."""
        return fusing.fused_rows if self.delta is None else min(fusing.fused_rows, self.delta.fused_rows)

    @property
    def is_whole(self) -> bool:
        """Whether the product needs nothing from other ranks."""
        return not self._sums and not self._gathers

    def _finished(self, y: Tensor, addition: Addition | None) -> Tensor:
        if addition is not None:
            addition.add_to(y)
        return y

    @property
    def nbytes(self) -> int:
        return self.scheme.nbytes if self._matrix is None else self._matrix.nbytes


def emit_sum(
    b: ProgramBuilder, source: int, columns: int, mesh: Mesh, norm: NormArgs | None = None, scale: float = 1.0
) -> None:
    """Add the sum over ranks of a buffer of float32 rows, normalized if there is a norm and times `scale`, to the
    residual stream, in a native program."""
    if norm is None:
        b.all_reduce(source, RESIDUAL, columns, mesh.exchange, add=scale)
        return
    if mesh.size > 1:
        b.all_reduce(source, source, columns, mesh.exchange)
    b.norm(source, RESIDUAL, Dtype.FLOAT, norm, add=scale)


class Linear(Projection):
    """One or several projections of the same input, computed in one multiplication.

    Attributes:
        parts: the projections in output order; a checkpoint stores each as `path.part.suffix`.
        shard: how the layer divides over ranks.
        cuts: the features of each part on this rank.
        sizes: output features of each part on this rank.
    """

    def __init__(
        self,
        path: str,
        device: torch.device,
        parts: Sequence[Part],
        shard: AnyShard,
        scheme: Scheme,
        mesh: Mesh = ALONE,
        *,
        gates: bool = False,
        activation: str = "silu",
        gather: bool = False,
    ) -> None:
        """
        Args:
            gather: give every rank all outputs of a COL layer.
        """
        super().__init__(path, device, scheme, mesh)
        self.parts = tuple(parts)
        self.shard = shard
        self.gates, self.activation = gates, activation
        self.has_bias = any(part.bias for part in parts)
        self._gather = gather and shard is COL
        self.cuts = [cut(shard, i, part.out_features, part.in_features, mesh) for i, part in enumerate(parts)]
        stored = zip(self.parts, self._stored_parts, strict=True)
        self.superseded = tuple(self._name(part, "bias") for part, own in stored if part.bias and not own.bias)
        self.sizes = [own.num_outputs(part.out_features) for part, own in zip(parts, self.cuts, strict=True)]

    def into(self, stream: Stream, x: Activations) -> None:
        if self.mesh.size == 1 or self.shard is not ROW:
            super().into(stream, x)
            return
        y = self._share(x)
        if stream.waits:
            stream.settle()  # the sum before, if no norm has taken it: few may be on their way
        if stream.waits and (begun := self.mesh.begin_sum(y)) is not None:
            stream.add_summands_later(begun if isinstance(begun, RankSum) else Begun(begun))
        elif (later := self.mesh.sum_later(y)) is not None:
            stream.add_summands_later(later)
        else:
            stream.add_later(self.mesh.all_reduce(y))

    def _share(self, x: Activations) -> Tensor:
        """Return this rank's part of the sum over ranks that is the output."""
        if isinstance(x, Rounded):
            assert self._rounding_scheme is not None
            return self._rounding_scheme.multiply_rounded(x)
        addition = None if self.delta is None else self.delta.begin(x)
        y = self.scheme.apply(x)
        if addition is not None:
            addition.add_to(y)
        return y

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The output's parts, as views."""
        parts: tuple[Tensor, ...] = y.split(self.sizes, dim=-1)
        return parts

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(
                self._name(part, suffix),
                spec,
                blocks=self.scheme.takes_blocks and suffix == "weight",
                codes=self.scheme.takes_codes,
                index=own.index(spec, part.out_features, part.in_features),
            )
            for part, own in self._pieces
            for suffix, spec in self.scheme.stored(part).items()
        ]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        given = [tensor for tensor in tensors if tensor is not None]
        assert len(given) == len(tensors), "a linear layer's tensors are not optional"
        source = iter(given)
        pieces = self._pieces
        self.scheme.prepare([{suffix: next(source) for suffix in self.scheme.stored(part)} for part, _ in pieces])

    @property
    def _stored_parts(self) -> tuple[Part, ...]:
        """Return the parts that this rank stores. Only rank 0 has a bias that is added after a sum over ranks."""
        if self.shard is ROW and self.mesh.rank:
            return tuple(replace(part, bias=False) for part in self.parts)
        return self.parts

    @property
    def _pieces(self) -> list[tuple[Part, Cut]]:
        """Return the consecutive features of each part that this rank stores, which are read and fused one by one."""
        return [
            (part, piece) for part, own in zip(self._stored_parts, self.cuts, strict=True) for piece in own.pieces()
        ]

    @property
    def _sums(self) -> bool:
        return self.mesh.size > 1 and self.shard is ROW

    @property
    def _gathers(self) -> bool:
        return self.mesh.size > 1 and self._gather

    def _finished(self, y: Tensor, addition: Addition | None) -> Tensor:
        if addition is not None:
            addition.add_to(y)
        if self._sums:
            return self.mesh.all_reduce(y)
        return self.mesh.all_gather(y) if self._gathers and not self._keeps_own else y

    def _name(self, part: Part, suffix: str) -> str:
        return f"{self.path}.{part.name}.{suffix}" if self.path else f"{part.name}.{suffix}"

    def extra_repr(self) -> str:
        names = ", ".join(f"{part.name}: {part.in_features} -> {part.out_features}" for part in self.parts)
        return f"{names}, shard={self.shard}"
