"""`Checkpoint`: the loader's interface to weights: tensors by Hugging Face name, independent of the file format."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from torch import Tensor

from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec


class Checkpoint(Protocol):
    """A source of named tensors. Tensors are read lazily."""

    @property
    def origin(self) -> str:
        """Name of the source in error messages: a file or folder."""
        ...

    def names(self) -> Set[str]:
        """Return the Hugging Face names of the stored tensors. Empty for a source that generates tensors."""
        ...

    def has(self, name: str) -> bool:
        """Return whether the source has this tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a stored tensor's shape, without reading it; None from a source that generates tensors."""
        ...

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        """Return a quantized matrix in its stored form, if `QuantizedBlocks` can represent the format; else None.

        Args:
            entry: of a tensor that holds several matrices in its first dimension: which one, as [outputs, inputs], also
                if it is stored transposed.
            codes: codes of a `Codebook` are representable, too.
            index: return only this part, [outputs, inputs]; None for all. What can't be divided there is not
                representable.
        """
        ...

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        """Return a tensor, or its part `index`, in CPU memory; possibly a view into a mapped file.

        `spec.dtype` is the wanted dtype: a source that computes the values returns that dtype, others return the stored
        one.

        Raises:
            ModelFileError: the data can't be read; the text names the file and the tensor.
        """
        ...
