"""Schemes that round each weight to the nearest value of a grid, without data to calibrate on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Rounding:
    """A scheme of compressed-tensors (https://github.com/vllm-project/compressed-tensors), symmetric around zero.

    Attributes:
        bits: of a weight.
        floats: weights become E4M3 instead of integers.
        grouped: a scale for each group of inputs, else one for each output.
        activations: engines with such kernels also round activations to this type, token by token.
        about: for the command's help.
    """

    bits: int
    about: str
    floats: bool = False
    grouped: bool = False
    activations: bool = False

    @property
    def format(self) -> str:
        """The name of the stored tensors' layout."""
        if self.activations:
            return "float-quantized" if self.floats else "int-quantized"
        return "pack-quantized"

    def settings(self, group_size: int, ignored: list[str]) -> dict[str, Any]:
        """Return the checkpoint's `quantization_config`.

        Args:
            group_size: inputs of a group, if the scheme has groups.
            ignored: names of linear modules that are not quantized.
        """
        kind = "float" if self.floats else "int"
        weights = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": True,
            "strategy": "group" if self.grouped else "channel",
            "group_size": group_size if self.grouped else None,
            "dynamic": False,
        }
        tokens = {"num_bits": self.bits, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens if self.activations else None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }

    def stored(self, weight: Tensor, group_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Round a matrix [N, K] of float32; return its stored tensors by suffix.

        Args:
            dtype: of scales.
        """
        outputs, inputs = weight.shape
        grouped = weight.reshape(outputs, -1, group_size if self.grouped else inputs)
        largest = grouped.abs().amax(-1)
        if self.floats:
            scales = _scales(largest / torch.finfo(E4M3).max, dtype)
            return {"weight": (grouped / scales.float()[..., None]).view_as(weight).to(E4M3), "weight_scale": scales}
        half = 1 << (self.bits - 1)
        scales = _scales(largest / (half - 0.5), dtype)
        integers = (grouped / scales.float()[..., None]).round_().clamp_(-half, half - 1).view_as(weight)
        if self.activations:
            return {"weight": integers.to(torch.int8), "weight_scale": scales}
        shape = torch.tensor(weight.shape)
        return {"weight_packed": pack(integers.int() + half, self.bits), "weight_scale": scales, "weight_shape": shape}


ROUNDINGS: Mapping[str, Rounding] = {
    "w4a16": Rounding(4, "4-bit integers in groups", grouped=True),
    "w8a16": Rounding(8, "8-bit integers, a scale per output"),
    "int8": Rounding(8, "the same, with activations in 8 bits where an engine has such kernels", activations=True),
    "fp8": Rounding(8, "E4M3, a scale per output; activations likewise", floats=True, activations=True),
}


def pack(integers: Tensor, bits: int) -> Tensor:
    """Pack integers [N, K] below 2 ** bits to words [N, ceil(K * bits / 32)], the first in the lowest bits."""
    per_word = 32 // bits
    whole = functional.pad(integers, (0, -integers.shape[1] % per_word))
    words = whole.view(len(whole), -1, per_word).long() << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int32)


def _scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in a dtype; 1 for groups of zeros."""
    rounded = scales.to(dtype)
    return rounded.masked_fill_(rounded == 0, 1)
