"""Access to a GGUF file's metadata below its architecture's prefix."""

from __future__ import annotations

import struct
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_file import GGUFFile


class Keys:
    """The metadata of a model, and the names of its tensors.

    Attributes:
        arch: the architecture's name, which is the prefix of the keys.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.arch = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value that is the same for all layers.

        Raises:
            ModelFileError: it is a list of different values.
        """
        value = self.each(key, default)
        if isinstance(value, list):
            value = self._same(key, value)
        return shortest(value) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """Return a value that every model of this architecture has.

        Raises:
            ModelFileError: it is missing.
        """
        value = self.get(key)
        if value is None:
            raise ModelFileError(f"{self.file.path} lacks the metadata {self.arch}.{key}; the model can't be built.")
        return value

    def most(self, key: str, default: Any = None) -> Any:
        """Return a value that is the same for all layers that have the part it belongs to, and 0 for the others.

        Raises:
            ModelFileError: it is missing and has no default, or is a list of different values.
        """
        value = self.each(key, default)
        if isinstance(value, list):
            return self._same(key, [one for one in value if one] or [0])
        return self.need(key) if value is None else value

    def each(self, key: str, default: Any = None) -> Any:
        """Return a value that may be a list with one element per layer."""
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def has(self, *tensors: str) -> bool:
        """Return whether the file has any of these tensors."""
        return any(name in self.file.tensors for name in tensors)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        heads = self.most("attention.head_count")
        size: int = self.get("attention.key_length") or self.need("embedding_length") // (heads or 1)
        return size

    def _same(self, key: str, values: list[Any]) -> Any:
        if len(set(values)) != 1:
            raise ModelFileError(
                f"{self.file.path}: {self.arch}.{key} differs from layer to layer, which is not supported."
            )
        return values[0]


def shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    single = struct.pack("<f", value)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == single:
            return short
    return value
