"""`QuantizedCheckpoint`: a checkpoint of quantized weights, as one of plain matrices."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.quantized.codes import Codes
from octavo.models.load.quantized.integers import Integers
from octavo.models.load.quantized.method import Method, Module
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec, part_of


class QuantizedCheckpoint:
    """A view of `source` in which each quantized module has a tensor `weight` instead of its stored tensors.

    `blocks` returns the stored integers, if layers can keep them; `tensor` computes values.

    Attributes:
        quantized: names of these tensors, which are [outputs, inputs] also in families that store [inputs, outputs].
    """

    def __init__(self, source: Checkpoint, method: Method) -> None:
        self.origin = source.origin
        self._source = source
        self._method = method
        modules = method.modules(source.names())
        self._modules = {name + method.weight: Module(source, name, method.joint) for name in modules}
        self.quantized: Set[str] = self._modules.keys()
        stored = {name + method.joint + suffix for name in modules for suffix in method.suffixes}
        self._names = (source.names() - stored) | self._modules.keys()

    def names(self) -> Set[str]:
        return self._names

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        module = self._modules.get(name)
        return self._source.shape(name) if module is None else self._method.shape(module)

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        module = self._modules.get(name)
        if module is None:
            return self._source.blocks(name, entry, codes=codes, index=index)
        own = None if index is None or entry is not None else self._method.cut(module, index)
        if own is not None:
            module, index = own, None
        matrix = self._method.matrix(module) if entry is None else self._method.entry(module, entry)
        return part_of(matrix.blocks(), index) if isinstance(matrix, (Integers, Codes) if codes else Integers) else None

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        module = self._modules.get(name)
        if module is None:
            tensor = self._source.tensor(name, spec, index)
            if tensor.dtype.itemsize == 1 and spec.dtype.is_floating_point:
                raise self._without_scale(name, tensor)
            return tensor
        if index is not None:
            return self._method.part(module, index).to(spec.dtype)
        matrix = self._method.matrix(module)
        return (matrix.dequantized() if isinstance(matrix, Integers | Codes) else matrix).to(spec.dtype)

    def _without_scale(self, name: str, tensor: Tensor) -> ModelFileError:
        """Return the error for values of 8 bits that would be taken for weights as they are."""
        if not name.endswith("weight"):
            return ModelFileError(
                f"Tensor {name} in {self.origin} is {tensor.dtype} and has the matrices of several experts, whose "
                "scales are not read. Get a checkpoint that has each expert's matrices as tensors of their own."
            )
        scale = name.removesuffix("weight") + self._method.scale
        return ModelFileError(
            f"Tensor {name} in {self.origin} is {tensor.dtype}, but {self.origin} lacks its scale, {scale}. Get the "
            "checkpoint again, or one that is quantized as its quantization_config says."
        )
