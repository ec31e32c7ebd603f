"""The embedding table, and the output head that shares it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native.builder import RESIDUAL, ProgramBuilder
from octavo.nn.delta import Addition
from octavo.nn.linear import Projection
from octavo.nn.quant.base import Scheme
from octavo.nn.quant.blocks import dequantized
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.packed import Matrix, emit_lookup, table_of
from octavo.nn.quant.panels import FOUR
from octavo.nn.shard import Cut, share
from octavo.nn.weights import Keep, QuantizedBlocks, Stored, TensorSpec, Wanted, WeightLayer, fused, plain, tensor_bytes
from octavo.parallel.mesh import ALONE, Mesh


class Embedding(WeightLayer):
    """Maps token ids to vectors. A table of `QuantizedBlocks` is only stored, for look-ups by the native program.

    Attributes:
        rows, size: of the whole table.
        own: the rows on this rank, whose sum over ranks is the look-up; None for all.
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(
        self,
        path: str,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        size: int,
        *,
        takes_blocks: bool = False,
        takes_codes: bool = False,
        keep: Keep = fused,
        mesh: Mesh = ALONE,
    ) -> None:
        """
        Args:
            mesh: the ranks that divide the rows, if these are a multiple of the ranks.
        """
        super().__init__(path, device)
        self.dtype, self.rows, self.size = dtype, rows, size
        self.mesh = mesh
        self.own = None if mesh.size == 1 or rows % mesh.size else share(rows, mesh)
        self.weight = torch.empty(0)
        self.blocks: QuantizedBlocks | None = None
        self.takes_blocks, self.takes_codes = takes_blocks, takes_codes
        self.keep = keep
        self._matrix: Matrix | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids [T] int64: [T, size]."""
        if self.own is None:
            return F.embedding(ids, self.weight)
        places = ids - self.own.start
        elsewhere = (places < 0) | (places >= len(self.own))
        found = F.embedding(places.masked_fill_(elsewhere, 0), self.weight)
        return self.mesh.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def wanted(self) -> list[Wanted]:
        narrow = self.takes_blocks and self.size % FOUR == 0
        spec = TensorSpec((self.rows, self.size), self.dtype, out_dim=0, may_be_narrow=narrow)
        index = Cut(outputs=None if self.own is None else (self.own,)).index(spec, self.rows, self.size)
        return [Wanted(f"{self.path}.weight", spec, blocks=self.takes_blocks, codes=self.takes_codes, index=index)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (weight,) = tensors
        if isinstance(weight, QuantizedBlocks) and weight.order is not None:
            weight = dequantized(weight, self.dtype)  # look-ups read channels in order
        if isinstance(weight, QuantizedBlocks):
            self.blocks = weight
        else:
            self.weight = self.keep([plain(weight)])

    @property
    def table(self) -> Stored:
        """The table [rows, size], in the form in which it was placed."""
        return self.weight if self.blocks is None else self.blocks

    def release(self) -> None:
        """Drop the table, once it is kept in another form."""
        self.weight, self.blocks = torch.empty(0), None

    def pack(self) -> None:
        """Convert the table to the CPU kernels' format, for `emit_lookup`."""
        self._matrix = table_of(self.table)
        self.release()

    def take_packed(self, other: WeightLayer) -> None:
        """Take over the packed table of another layer of this kind, which must not be used any more."""
        assert isinstance(other, Embedding)
        self._matrix = other._matrix

    def emit_lookup(self, b: ProgramBuilder, scale: float = 1.0, output: int = RESIDUAL) -> None:
        """Add the look-up of the table's rows, times `scale`, to a native program. The output is the residual stream,
        or, if no ranks divide the table, any buffer of float32 rows."""
        assert self._matrix is not None, "the table is not packed"
        assert self.own is None or output == RESIDUAL
        emit_lookup(b, self._matrix, output, in_panels=self._matrix.is_quantized, scale=scale, own=self.own)
        self.emit_found(b)

    def emit_found(self, b: ProgramBuilder) -> None:
        """Add up the rows that the ranks have found, in the residual stream of a native program."""
        if self.own is not None:
            b.all_reduce(RESIDUAL, RESIDUAL, self.size, self.mesh.exchange)

    def emit_positions(self, b: ProgramBuilder, first: int) -> None:
        """Add the table's rows, by position from row `first` on, to the residual stream in a native program."""
        table = self._matrix
        assert table is not None, "the table is not packed"
        assert not table.is_quantized, "tables of positions are stored plainly"
        begin = table.weight[first:].data_ptr()
        b.add_positions(begin, table.dtype, table.columns, RESIDUAL)

    @property
    def nbytes(self) -> int:
        if self._matrix is not None:
            return self._matrix.nbytes
        return tensor_bytes(self.weight)


class TiedHead(Projection):
    """An output head that multiplies with the embedding table: [S, size] to [S, rows], on every rank.

    A scheme that packs its weights makes a packed copy, which takes the memory of another table, since a packed matrix
    can't be looked up by row.
    """

    scheme: Unquantized

    def __init__(self, path: str, embedding: Embedding, scheme: Scheme) -> None:
        super().__init__(path, embedding.device, scheme, embedding.mesh)
        self.superseded = (f"{path}.weight",)
        # In a list, so that the embedding is registered as a submodule once, where it belongs.
        self._source = [embedding]

    @property
    def source(self) -> Embedding:
        return self._source[0]

    def wanted(self) -> list[Wanted]:
        return []

    def place(self, tensors: Sequence[Stored | None]) -> None:
        """Share the embedding's table, which must be placed. `QuantizedBlocks` are dropped once they are packed."""
        self.scheme.share(self.source.table)
        if self.source.blocks is not None:
            self.release_source()

    def pack(self) -> None:
        super().pack()
        self.release_source()

    def emit_lookup(self, b: ProgramBuilder, scale: float = 1.0) -> None:
        """Add a look-up of the table's rows, times `scale`, into the residual stream, to a native program."""
        emit_lookup(b, self.matrix, RESIDUAL, in_panels=True, scale=scale, own=self.source.own)
        self.source.emit_found(b)

    @property
    def _gathers(self) -> bool:
        return self.source.own is not None

    def _finished(self, y: Tensor, addition: Addition | None) -> Tensor:
        y = super()._finished(y, addition)
        return self.mesh.all_gather(y) if self._gathers and not self._keeps_own else y

    def release_source(self) -> None:
        """Drop the embedding's own table, after its weights were converted to another format."""
        self.source.release()
