"""Where weights come from, as the loader sees it: tensors by their Hugging Face name, whatever the file format."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from torch import Tensor

from octavo.nn.weights import Blocks, Index, TensorSpec


class Checkpoint(Protocol):
    """A source of named tensors. Reading is lazy, so only what is asked for leaves the disk."""

    @property
    def origin(self) -> str:
        """What error messages call the source: a file or folder."""
        ...

    def names(self) -> Set[str]:
        """The tensors stored, under Hugging Face names. Empty for a source that makes up what it is asked for."""
        ...

    def has(self, name: str) -> bool:
        """Whether `tensor(name)` can be answered."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A stored tensor's shape, without reading it; None from a source that makes up what it is asked for."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """A quantized matrix as it is stored, if the format is one that `Blocks` can hold; else None."""
        ...

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        """A tensor in CPU memory, or the part of it that `index` cuts out; possibly a view into a mapped file.

        `spec.dtype` is the dtype wanted: a source that has to compute the values gives that one, the others give what
        is stored.

        Raises:
            ModelFileError: the data can't be read; the text names the file and the tensor.
        """
        ...
