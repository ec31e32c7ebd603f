"""Weights from tensors in memory, under Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor

from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec


class TensorCheckpoint:
    """The tensors of a mapping, which are read where they are."""

    origin = "what was sent"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name].shape)

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        return None

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor if index is None else tensor[index]
