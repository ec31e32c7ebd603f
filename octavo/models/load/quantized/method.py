"""`Method`: how one kind of checkpoint stores quantized matrices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.quantized.codes import Codes
from octavo.models.load.quantized.integers import Integers
from octavo.nn.shard import local_shape
from octavo.nn.weights import Index, TensorSpec

Settings = Mapping[str, Any]
"""The checkpoint's `quantization_config`."""
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)
FLOATS_8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_LEAST_SCALE = 2.0**-126
"""Of activations: less has no inverse in float32."""
_PADDED = 32
"""Features in multiples of this fill whole words of 32 bits, with any number of bits each."""
WORDS = (torch.int32,)
BYTES = (torch.uint8,)


class Module:
    """The stored tensors of one quantized module, or of a part of its matrix.

    Attributes:
        name: the module's, such as "model.layers.0.mlp.down_proj".
    """

    def __init__(
        self,
        source: Checkpoint,
        name: str,
        joint: str = ".",
        *,
        cuts: Mapping[str, Index] | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        """
        Args:
            cuts: suffix -> the part of this tensor that belongs to the part of the matrix; without one, the whole does.
            given: suffix -> the tensor itself, in place of the stored one.
        """
        self.name = name
        self._source = source
        self._joint = joint
        self._cuts, self._given = cuts or {}, given or {}

    def part(self, cuts: Mapping[str, Index], given: Mapping[str, Tensor]) -> Module:
        """Return a part of this module, which is whole."""
        return Module(self._source, self.name, self._joint, cuts=cuts, given=given)

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
        if suffix in self._given:
            return tuple(self._given[suffix].shape)
        name = self._checked(suffix)
        shape = self._source.shape(name)
        return local_shape(shape if shape is not None else self._read(name).shape, self._cuts.get(suffix))

    def sizes(self, suffix: str) -> tuple[int, int]:
        """Return a matrix's shape, without reading it.

        Raises:
            ModelFileError: it is missing, or no matrix.
        """
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise self.wrong(suffix, f"has shape {list(shape)}, which is no matrix")
        return shape[0], shape[1]

    def stored(self, suffix: str, dtypes: Collection[torch.dtype], *shape: int | None) -> Tensor:
        """Return a tensor of one of these dtypes and of this shape, in which None is any size.

        Raises:
            ModelFileError: it is missing, or another one.
        """
        tensor = self.tensor(suffix)
        sizes = list(tensor.shape)
        fits = len(sizes) == len(shape) and all(want in (None, size) for want, size in zip(shape, sizes, strict=True))
        if tensor.dtype not in dtypes or not fits:
            raise self.wrong(suffix, f"is {_named([tensor.dtype])} {sizes}, not {_named(dtypes)} {_wanted(shape)}")
        return tensor

    def scale(self, suffix: str) -> Tensor:
        """Return the number of a tensor that has only one, of any shape: [].

        Raises:
            ModelFileError: it is missing, has several, or is not floating point.
        """
        tensor = self.tensor(suffix)
        if tensor.numel() != 1 or tensor.dtype not in SCALE_DTYPES:
            raise self.wrong(suffix, f"is {_named([tensor.dtype])} {list(tensor.shape)}, not one floating-point number")
        return tensor.float().view(())

    def input_scale(self, suffix: str) -> float:
        """Return the number by which the module's inputs are divided before they are rounded; see `InputScale`.

        Raises:
            ModelFileError: it is missing, has several, or is not positive and finite.
        """
        scale = float(self.scale(suffix))
        if not _LEAST_SCALE <= scale < math.inf:
            raise self.wrong(suffix, f"is {scale:g}, not a positive finite number")
        return scale

    def tensor(self, suffix: str, index: Index | None = None) -> Tensor:
        """Return a tensor, or its part `index`, as it is stored.

        Raises:
            ModelFileError: it is missing, or can't be read.
        """
        if suffix in self._given:
            return self._given[suffix]
        return self._read(self._checked(suffix), self._cuts.get(suffix) if index is None else index)

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


def _named(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _wanted(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


class Method(ABC):
    """One kind of quantized checkpoint. A quantized module's tensors are named `{module}{joint}{suffix}`.

    Attributes:
        name: as users know it, for messages.
        suffixes: of a quantized module's tensors, the weight's included; biases are not quantized.
        scale: the tensor that distinguishes a quantized module's `weight` from one that is not quantized.
        weight: end of the name of the matrix that a checkpoint without quantization has.
        is_static: modules have scales of activations, by the configuration.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    scale = "weight_scale"
    joint = "."
    weight = ".weight"
    is_static = False

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

    def cut(self, module: Module, index: Index) -> Module | None:
        """Return the part [outputs, inputs] of a module, which reads no more of the stored tensors than it needs; None
        if they can't be cut there.

        Raises:
            ModelFileError: as `shape`.
        """
        return None

    def part(self, module: Module, index: Index) -> Tensor:
        """Return a part of a module's matrix, as values. A method whose modules hold many matrices overrides it to
        expand no more than that.

        Raises:
            ModelFileError: as `matrix`.
        """
        own = self.cut(module, index)
        if own is not None:
            found = self.matrix(own)
            return found.dequantized() if isinstance(found, Integers | Codes) else found
        matrix = self.matrix(module)
        if isinstance(matrix, Integers | Codes):
            return matrix.of_outputs(index[0]).dequantized()[:, index[1]]
        return matrix[index]

    def _cut_evenly(
        self, module: Module, index: Index, dims: Mapping[str, tuple[int | None, int | None]]
    ) -> dict[str, Index] | None:
        """Return the part of each tensor that belongs to a part of the matrix; None if one can't be cut there.

        Args:
            dims: suffix -> the tensor's dimensions of outputs and of inputs; None if it has none of them, or one for
                all. Equal numbers of features have equal numbers of elements.
        """
        sizes, cuts = self.shape(module), {}
        begin, end, _ = index[1].indices(sizes[1])
        if begin % _PADDED or (end % _PADDED and end < sizes[1]):
            return None  # of fewer inputs, shapes tell neither groups nor the number of bits
        for suffix, places in dims.items():
            if not module.has(suffix):
                continue
            stored = module.shape(suffix)
            own = [slice(None)] * len(stored)
            for wanted, dim, features in zip(index, places, sizes, strict=True):
                begin, end, _ = wanted.indices(features)
                if dim is None or (begin, end) == (0, features):
                    continue
                if dim >= len(stored) or not stored[dim]:
                    return None  # the checkpoint is damaged; reading all of it reports that
                if stored[dim] == 1 and features > _PADDED:
                    continue
                most, least = max(features, stored[dim]), min(features, stored[dim])
                if most % least or features % _PADDED or begin * stored[dim] % features or end * stored[dim] % features:
                    return None
                own[dim] = slice(begin * stored[dim] // features, end * stored[dim] // features)
            cuts[suffix] = tuple(own)
        return cuts

    def _with(self, suffix: str, names: Set[str]) -> Set[str]:
        """Return the modules that have a tensor of this suffix."""
        end = self.joint + suffix
        return {name.removesuffix(end) for name in names if name.endswith(end)}
