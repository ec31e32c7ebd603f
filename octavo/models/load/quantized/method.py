"""`Method`: how one kind of checkpoint stores quantized matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.quantized.codes import Codes
from octavo.models.load.quantized.integers import Integers
from octavo.nn.weights import Index, TensorSpec

Settings = Mapping[str, Any]
"""The checkpoint's `quantization_config`."""


class Module:
    """The stored tensors of one quantized module.

    Attributes:
        name: the module's, such as "model.layers.0.mlp.down_proj".
    """

    def __init__(self, source: Checkpoint, name: str, joint: str = ".") -> None:
        self.name = name
        self._source = source
        self._joint = joint

    @property
    def origin(self) -> str:
        return self._source.origin

    def has(self, suffix: str) -> bool:
        return f"{self.name}{self._joint}{suffix}" in self._source.names()

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it.

        Raises:
            ModelFileError: it is missing.
        """
        name = self._checked(suffix)
        shape = self._source.shape(name)
        return shape if shape is not None else tuple(self._read(name).shape)

    def tensor(self, suffix: str, index: Index | None = None) -> Tensor:
        """Return a tensor, or its part `index`, as it is stored.

        Raises:
            ModelFileError: it is missing, or can't be read.
        """
        return self._read(self._checked(suffix), index)

    def wrong(self, suffix: str, why: str) -> ModelFileError:
        """Return the error for a tensor that does not fit the module."""
        return ModelFileError(
            f"Tensor {self.name}{self._joint}{suffix} in {self.origin} {why}. Get the checkpoint again, or one that is "
            "quantized as its quantization_config says."
        )

    def _read(self, name: str, index: Index | None = None) -> Tensor:
        return self._source.tensor(name, TensorSpec((), torch.float32), index)

    def _checked(self, suffix: str) -> str:
        name = f"{self.name}{self._joint}{suffix}"
        if not self._source.has(name):
            raise ModelFileError(
                f"{self.name} is quantized, but {self.origin} lacks its tensor {name}. Get the checkpoint again."
            )
        return name


class Method(ABC):
    """One kind of quantized checkpoint. A quantized module's tensors are named `{module}{joint}{suffix}`.

    Attributes:
        name: as users know it, for messages.
        suffixes: of a quantized module's tensors, the weight's included; biases are not quantized.
        scale: the tensor that distinguishes a quantized module's `weight` from one that is not quantized.
        weight: end of the name of the matrix that a checkpoint without quantization has.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    scale = "weight_scale"
    joint = "."
    weight = ".weight"

    @abstractmethod
    def modules(self, names: Set[str]) -> Set[str]:
        """Return the names of the modules whose weights are quantized."""

    @abstractmethod
    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of a module's matrix, [N, K].

        Raises:
            ModelFileError: the stored shapes contradict each other.
        """

    @abstractmethod
    def matrix(self, module: Module) -> Integers | Codes | Tensor:
        """Return a module's matrix [N, K]: its integers or codes, or float32 values if it has none.

        Raises:
            ModelFileError: a tensor is missing, or does not fit the others.
        """

    def entry(self, module: Module, entry: int) -> Codes | None:
        """Return one matrix [N, K] of a module that holds several, however the plain tensor is arranged; None if its
        codes are not kept.

        Raises:
            ModelFileError: as `matrix`.
        """
        return None

    def part(self, module: Module, index: Index) -> Tensor:
        """Return a part of a module's matrix, as values. A method whose modules hold many matrices overrides it to
        expand no more than that.

        Raises:
            ModelFileError: as `matrix`.
        """
        matrix = self.matrix(module)
        if isinstance(matrix, Integers | Codes):
            return matrix.of_outputs(index[0]).dequantized()[:, index[1]]
        return matrix[index]

    def _with(self, suffix: str, names: Set[str]) -> Set[str]:
        """Return the modules that have a tensor of this suffix."""
        end = self.joint + suffix
        return {name.removesuffix(end) for name in names if name.endswith(end)}
