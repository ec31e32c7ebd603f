"""MXFP4 as gpt-oss publishes it: experts' matrices of 4-bit floats, with a power of two for each 32 inputs."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from octavo.models.load.quantized.codes import Codes, coded, halves
from octavo.models.load.quantized.floats import from_e2m1, from_e8m0
from octavo.models.load.quantized.method import BYTES, Method, Module, Settings
from octavo.nn.weights import E2M1, Index


class MXFP4(Method):
    """`NAME_blocks` [E, N, G, 16] of pairs and `NAME_scales` [E, N, G], for the tensor NAME [E, K, N] of a checkpoint
    without quantization."""

    name = "MXFP4"
    suffixes = ("blocks", "scales")
    joint, weight = "_", ""

    def __init__(self, settings: Settings) -> None:
        """Take no settings: there is one form."""

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("blocks", names) | self._with("scales", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        shape = module.shape("blocks")
        if len(shape) != 4 or shape[3] != 16:
            raise module.wrong("blocks", f"has shape {list(shape)}, not [experts, outputs, groups, 16]")
        experts, outputs, groups, size = shape
        return experts, groups * size * 2, outputs

    def matrix(self, module: Module) -> Tensor:
        return self._values(module, None)

    def entry(self, module: Module, entry: int) -> Codes:
        blocks, scales = self._stored(module, (slice(entry, entry + 1),))
        return coded(halves(blocks[0]).flatten(1), from_e8m0(scales[0]), E2M1)

    def part(self, module: Module, index: Index) -> Tensor:
        experts, *within = index
        return self._values(module, (experts,))[(slice(None), *within)]

    def _values(self, module: Module, experts: Index | None) -> Tensor:
        blocks, scales = self._stored(module, experts)
        values = from_e2m1(blocks).mul_(from_e8m0(scales)[..., None])
        return values.flatten(2).transpose(1, 2).contiguous()

    def _stored(self, module: Module, experts: Index | None) -> tuple[Tensor, Tensor]:
        """Return the pairs and the scales of some experts; None for all."""
        blocks, scales = module.tensor("blocks", experts), module.tensor("scales", experts)
        for suffix, tensor in (("blocks", blocks), ("scales", scales)):
            if tensor.dtype not in BYTES:
                raise module.wrong(suffix, f"is {tensor.dtype}, not uint8")
        if scales.shape != blocks.shape[:-1]:
            raise module.wrong("scales", f"has shape {list(scales.shape)} for blocks {list(blocks.shape)}")
        return blocks, scales
