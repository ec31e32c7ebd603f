"""The embedding table, and the output head that shares it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.quant.base import Fusing
from octavo.nn.quant.none import Unquantized
from octavo.nn.weights import Blocks, Keep, TensorSpec, Wanted, WeightLayer, fused, tensor_bytes


class Embedding(WeightLayer):
    """Token ids to vectors. Where it takes `Blocks`, it only keeps them for the native program to look up."""

    def __init__(
        self,
        path: str,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        size: int,
        *,
        takes_blocks: bool = False,
        keep: Keep = fused,
    ) -> None:
        super().__init__(path, device)
        self.dtype, self.rows, self.size = dtype, rows, size
        self.weight: Tensor | Blocks = torch.empty(0)
        self.takes_blocks = takes_blocks
        self.keep = keep

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 to [T, size]."""
        return F.embedding(ids, self.weight)

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(
                f"{self.path}.weight",
                TensorSpec((self.rows, self.size), self.dtype, out_dim=0),
                blocks=self.takes_blocks,
            )
        ]

    def place(self, tensors: Sequence[Tensor | None]) -> None:
        (weight,) = tensors
        assert weight is not None
        self.weight = weight if isinstance(weight, Blocks) else self.keep([weight])

    @property
    def nbytes(self) -> int:
        return tensor_bytes(*([] if isinstance(self.weight, Blocks) else [self.weight]))


class TiedHead(WeightLayer):
    """An output head that multiplies with the embedding table.

    A scheme that packs its weights has a packed copy of its own, since a packed matrix can't be looked up by row: one
    more table's worth of memory.
    """

    def __init__(self, path: str, embedding: Embedding, scheme: type[Unquantized] = Unquantized) -> None:
        super().__init__(path, embedding.device)
        self.superseded = (f"{path}.weight",)
        self.scheme = scheme(embedding.dtype, embedding.device, embedding.keep)
        # In a list, so that the embedding is registered as a submodule once, where it belongs.
        self._source = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        """[S, size] to [S, rows]."""
        return self.scheme.apply(x)

    def wide(self, x: Tensor) -> Tensor:
        """`forward`, in float32 where that costs little."""
        return self.scheme.wide(x)

    @property
    def fusing(self) -> Fusing | None:
        """The scheme, if it takes the neighbours of this layer into its launch."""
        return self.scheme if isinstance(self.scheme, Fusing) else None

    @property
    def source(self) -> Embedding:
        return self._source[0]

    def wanted(self) -> list[Wanted]:
        return []

    def place(self, tensors: Sequence[Tensor | None]) -> None:
        """Takes nothing: the embedding has its tensor by now. One of `Blocks` is dropped once it is packed."""
        self.scheme.share(self.source.weight)
        if isinstance(self.source.weight, Blocks):
            self.release_source()

    def release_source(self) -> None:
        """The table is kept in another form from now on, and this layer's embedding no longer needed."""
        self.source.weight = torch.empty(0)

    @property
    def nbytes(self) -> int:
        return self.scheme.nbytes
