"""`Matrix`: a layer's weights in the CPU kernels' format, moved from its scheme."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.native.bindings import Dtype, LowRank
from octavo.native.builder import STORED, ProgramBuilder, Results, row_bytes
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.panels import PANEL, interleave, pack_, pack_halves, pad_bias, whole_halves, whole_words
from octavo.nn.weights import Stored, tensor_bytes

DTYPES = {torch.float32: Dtype.FLOAT, torch.bfloat16: Dtype.BFLOAT}
NAMES = {
    Dtype.FLOAT: "float32",
    Dtype.BFLOAT: "bfloat16",
    Dtype.INT8: "8-bit integers",
    Dtype.INT4: "4-bit integers",
    Dtype.CODE4: "4-bit codes",
    Dtype.CODE6: "6-bit integers",
    Dtype.E4M3: "E4M3",
    Dtype.E5M2: "E5M2",
    Dtype.BF16: "bfloat16",
    Dtype.F16: "float16",
}


@dataclass(slots=True)
class Matrix:
    """A matrix in panels of 16 outputs, or a plain table of rows.

    Attributes:
        rows, columns: outputs and inputs.
        bias: float32, padded to whole panels.
        zero_point, minima, order: of integer weights; see `QuantizedBlocks`.
        book, group: of codes; see `nn/quant/codes.py`.
    """

    dtype: Dtype
    rows: int
    columns: int
    weight: Tensor
    bias: Tensor | None = None
    zero_point: int = 0
    minima: bool = False
    order: Tensor | None = None
    book: Tensor | None = None
    group: int = 0

    @property
    def is_integers(self) -> bool:
        """Whether the weights are the checkpoint's integers."""
        return self.dtype in (Dtype.INT4, Dtype.INT8)

    @property
    def is_quantized(self) -> bool:
        """Whether they are integers or codes."""
        return self.dtype not in (Dtype.FLOAT, Dtype.BFLOAT)

    @property
    def form(self) -> str:
        """The form in which the kernels read it, for messages."""
        minima = " with minima" if self.minima else ""
        return f"{NAMES[self.dtype]}{minima}{'' if self.order is None else ', inputs reordered'}"

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight, self.bias, self.order, self.book)

    def emit(
        self,
        b: ProgramBuilder,
        source: int,
        output: int,
        results: Results = STORED,
        low_rank: LowRank | None = None,
    ) -> None:
        """Add the product of a buffer with these weights to a native program; see `ProgramBuilder.linear`."""
        b.linear(
            source,
            output,
            self.dtype,
            len(self.weight) * PANEL,  # of halves that alternate, each has whole panels
            self.columns,
            self.weight.data_ptr(),
            results=results,
            bias=0 if self.bias is None else self.bias.data_ptr(),
            zero_point=self.zero_point,
            minima=self.minima,
            low_rank=low_rank,
            book=0 if self.book is None else self.book.data_ptr(),
            group=self.group,
        )


def packed(scheme: object, *, paired: bool = False) -> Matrix:
    """Move a scheme's weights into panels; the scheme keeps none.

    Args:
        paired: alternate the panels of the two halves, for the GATE epilogue.
    """
    assert isinstance(scheme, Unquantized)
    rows = 0 if scheme.weight is None else scheme.weight.shape[0]
    if paired:
        scheme.weight, scheme.bias = whole_halves(scheme.weight), whole_halves(scheme.bias)
    bias = None if scheme.bias is None else pad_bias(scheme.bias)
    if bias is not None and paired:
        bias = interleave(*bias.chunk(2))
    scheme.bias = None
    if isinstance(scheme, BlockQuantized) and scheme.packed is not None:
        panels, (rows, columns) = scheme.packed, scheme.shape
        form = (scheme.zero_point, scheme.has_minima, scheme.order, scheme.book, scheme.group)
        matrix = Matrix(scheme.form, rows, columns, panels, bias, *form)
        scheme.packed = None
    else:
        weight = scheme.weight
        assert weight is not None, "weights are not loaded"
        matrix = replace(_plain(weight, scheme.dtype, bias), rows=rows)
        panels, scheme.weight = matrix.weight, None
    if paired:
        panels.copy_(interleave(*panels.chunk(2)))
    return matrix


def emit_rounded(b: ProgramBuilder, matrix: Matrix, source: int, given: Dtype) -> int:
    """Add the conversion of a buffer, whose rows have dtype `given`, to what the matrix is multiplied with, to a native
    program; return the converted rows' buffer, which is `source` if they are that already."""
    meets = b.meets(matrix.dtype)
    if meets is given and matrix.order is None:
        return source
    if not matrix.is_integers:
        rounded = b.scratch("rounded", row_bytes(meets, matrix.columns))
        b.narrow(source, rounded, matrix.columns)
        return rounded
    rounded = b.scratch("rounded", row_bytes(meets, matrix.columns, b.planes))
    order = 0 if matrix.order is None else matrix.order.data_ptr()
    b.quantize(source, rounded, given, matrix.columns, zero_point=matrix.zero_point, order=order)
    return rounded


def in_order(matrix: Matrix, y: Tensor, *, paired: bool) -> Tensor:
    """Return the outputs of a packed product [T, panels * 16], whose two halves alternate panel by panel if `paired`,
    as [T, rows]."""
    if not paired:
        return y[:, : matrix.rows]
    halves = y.unflatten(1, (-1, 2, PANEL)).transpose(1, 2).flatten(2)
    ordered: Tensor = halves[:, :, : matrix.rows // 2].flatten(1)
    return ordered


def _plain(weight: Tensor, activations: torch.dtype, bias: Tensor | None) -> Matrix:
    """Pack a matrix [N, K], which is float32 or stored in 16 bits."""
    rows, columns = weight.shape
    if weight.dtype is activations:
        weight = whole_words(weight)
        return Matrix(DTYPES[weight.dtype], rows, weight.shape[1], pack_(weight), bias)
    if weight.dtype is torch.float16:
        return Matrix(Dtype.F16, rows, columns, pack_halves(weight), bias, group=columns)
    return Matrix(Dtype.BF16, rows, columns, pack_(weight), bias, group=columns)


def table_of(weight: Stored) -> Matrix:
    """Return an embedding table: plain rows, or integers or float16 in panels."""
    if isinstance(weight, Tensor) and weight.dtype in DTYPES:
        rows, columns = weight.shape
        return Matrix(DTYPES[weight.dtype], rows, columns, weight)
    scheme = BlockQuantized(torch.float32, torch.device("cpu"))
    scheme.share(weight)
    return packed(scheme)


def emit_lookup(
    b: ProgramBuilder, matrix: Matrix, output: int, *, in_panels: bool, scale: float = 1.0, own: range | None = None
) -> None:
    """Add a look-up of a matrix's rows, times `scale`, to a native program; `own` as for `ProgramBuilder.embed`."""
    b.embed(
        matrix.weight.data_ptr(),
        matrix.dtype,
        matrix.columns,
        output,
        packed=in_panels,
        zero_point=matrix.zero_point,
        minima=matrix.minima,
        scale=scale,
        book=0 if matrix.book is None else matrix.book.data_ptr(),
        group=matrix.group,
        own=own,
    )
