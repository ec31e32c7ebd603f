"""The embedding table, and the output head that shares it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.quant.none import Unquantised
from octavo.nn.weights import TensorSpec, Wanted, WeightLayer, owned, tensor_bytes


class Embedding(WeightLayer):
    """Token ids to vectors."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
        super().__init__(path, device)
        self.dtype, self.rows, self.size = dtype, rows, size
        self.weight = torch.empty(0)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 to [T, size]."""
        return F.embedding(ids, self.weight)

    def wanted(self) -> list[Wanted]:
        return [Wanted(f"{self.path}.weight", TensorSpec((self.rows, self.size), self.dtype, out_dim=0))]

    def place(self, tensors: Sequence[Tensor | None]) -> None:
        (weight,) = tensors
        assert weight is not None
        self.weight = owned(weight)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight)


class TiedHead(WeightLayer):
    """An output head that multiplies with the embedding table.

    A scheme that packs its weights has a packed copy of its own, since a packed matrix can't be looked up by row: one
    more table's worth of memory.
    """

    def __init__(self, path: str, embedding: Embedding, scheme: type[Unquantised] = Unquantised) -> None:
        super().__init__(path, embedding.device)
        self.superseded = (f"{path}.weight",)
        self.scheme = scheme(embedding.dtype, embedding.device)
        # In a list, so that the embedding is registered as a submodule once, where it belongs.
        self._source = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        """[S, size] to [S, rows]."""
        return self.scheme.apply(x)

    def wanted(self) -> list[Wanted]:
        return []

    def place(self, tensors: Sequence[Tensor | None]) -> None:
        """Takes nothing: the embedding, which stands before it in the model, has its tensor by now."""
        self.scheme.share(self._source[0].weight)

    @property
    def nbytes(self) -> int:
        return self.scheme.nbytes
