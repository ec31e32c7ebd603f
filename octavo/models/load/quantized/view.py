"""`QuantizedCheckpoint`: a checkpoint of quantized weights, as one of plain matrices."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.quantized.codes import Codes
from octavo.models.load.quantized.integers import Integers
from octavo.models.load.quantized.method import Method, Module
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec


class QuantizedCheckpoint:
    """A view of `source` in which each quantized module has a tensor `weight` instead of its stored tensors.

    `blocks` returns the stored integers, if layers can keep them; `tensor` computes values.
    """

    def __init__(self, source: Checkpoint, method: Method) -> None:
        self.origin = source.origin
        self._source = source
        self._method = method
        modules = method.modules(source.names())
        self._modules = {name + method.weight: Module(source, name, method.joint) for name in modules}
        stored = {name + method.joint + suffix for name in modules for suffix in method.suffixes}
        self._names = (source.names() - stored) | self._modules.keys()

    def names(self) -> Set[str]:
        return self._names

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        module = self._modules.get(name)
        return self._source.shape(name) if module is None else self._method.shape(module)

    def blocks(self, name: str, entry: int | None = None, *, codes: bool = False) -> QuantizedBlocks | None:
        module = self._modules.get(name)
        if module is None:
            return self._source.blocks(name, entry, codes=codes)
        matrix = self._method.matrix(module) if entry is None else self._method.entry(module, entry)
        return matrix.blocks() if isinstance(matrix, (Integers, Codes) if codes else Integers) else None

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        module = self._modules.get(name)
        if module is None:
            return self._source.tensor(name, spec, index)
        if index is not None:
            return self._method.part(module, index).to(spec.dtype)
        matrix = self._method.matrix(module)
        return (matrix.dequantized() if isinstance(matrix, Integers | Codes) else matrix).to(spec.dtype)
