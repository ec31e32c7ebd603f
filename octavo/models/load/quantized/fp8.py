"""Weights in 8-bit floating point, E4M3 or E5M2: DeepSeek's tiles of 128 x 128, AutoFP8's and ModelOpt's matrices."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from octavo.models.load.quantized.codes import E2M1, FLOATS, Codes, coded, halves
from octavo.models.load.quantized.method import Method, Module, Settings

_TILE = 128


class FP8(Method):
    """`weight` [N, K] in a dtype of 8 bits, with `weight_scale_inv` per tile, or `weight_scale` per matrix or output.

    Both are factors. Scales of activations are not read: activations are not rounded to 8 bits.
    """

    name = "FP8"
    suffixes: tuple[str, ...] = (
        "weight",
        "weight_scale_inv",
        "weight_scale",
        "input_scale",
        "activation_scale",
        "output_scale",
    )

    def __init__(self, settings: Settings) -> None:
        self._tile = tuple(settings.get("weight_block_size") or (_TILE, _TILE))

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("weight_scale_inv", names) | self._with("weight_scale", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        return module.shape("weight")

    def matrix(self, module: Module) -> Codes:
        weight = module.tensor("weight")
        if module.has("weight_scale_inv"):
            return tiled(module, weight, module.tensor("weight_scale_inv"), "weight_scale_inv", self._tile)
        return coded(weight, per_output(module, weight, module.tensor("weight_scale")))


class ModelOpt(FP8):
    """NVIDIA ModelOpt's: FP8 per matrix, or NVFP4: `weight` [N, K / 2] of pairs, `weight_scale` [N, K / 16] in E4M3,
    `weight_scale_2` for all."""

    name = "ModelOpt"
    suffixes = (*FP8.suffixes, "weight_scale_2")

    def shape(self, module: Module) -> tuple[int, ...]:
        rows, columns = module.shape("weight")
        return (rows, columns * 2) if module.has("weight_scale_2") else (rows, columns)

    def matrix(self, module: Module) -> Codes:
        if not module.has("weight_scale_2"):
            return super().matrix(module)
        scales = module.tensor("weight_scale").float() * module.tensor("weight_scale_2").float()
        return coded(halves(module.tensor("weight")), scales, E2M1)


def tiled(module: Module, weight: Tensor, scales: Tensor, suffix: str, tile: tuple[int, ...]) -> Codes:
    """Return weight [N, K] with the scales of tiles of this size.

    Raises:
        ModelFileError: there is another number of scales.
    """
    expected = [-(-size // part) for size, part in zip(weight.shape, tile, strict=True)]
    if list(scales.shape) != expected:
        raise module.wrong(suffix, f"has shape {list(scales.shape)}; tiles of {tile[0]} x {tile[1]} have {expected}")
    rows = scales.float().repeat_interleave(tile[0], 0)[: weight.shape[0]]
    return Codes(weight.view(torch.uint8), rows, tile[1], FLOATS[weight.dtype])


def per_output(module: Module, weight: Tensor, scales: Tensor) -> Tensor:
    """Return scales of a matrix, [] or [N, 1].

    Raises:
        ModelFileError: they are for something else.
    """
    if scales.numel() == 1:
        return scales.view(())
    if scales.numel() != weight.shape[0]:
        raise module.wrong("weight_scale", f"has {scales.numel()} scales for {weight.shape[0]} outputs")
    return scales.view(-1, 1)
