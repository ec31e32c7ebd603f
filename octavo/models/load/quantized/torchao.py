"""torchao (https://github.com/pytorch/ao), as its `flatten_tensor_state_dict` stores tensors in safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from octavo.models.load.quantized.codes import Codes, coded
from octavo.models.load.quantized.fp8 import tiled
from octavo.models.load.quantized.integers import Integers
from octavo.models.load.quantized.method import FLOATS_8, SCALE_DTYPES, Method, Module, Settings

_WITH_ZERO_POINTS = ("Int4WeightOnlyConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")


class TorchAO(Method):
    """The tensors of a weight's class, each below its name:

    - Float8Tensor: `_weight_qdata` [N, K] in 8-bit floats; `_weight_scale` [], [1 or N, 1] or per tile.
    - Int8Tensor, IntxUnpackedToInt8Tensor: `_weight_qdata` int8 [N, K]; `_weight_scale`, `_weight_zero_point` [N, G].
    - Int4Tensor: `_weight_qdata` [N, K / 2] of pairs of signed integers, the first in the low half; `_weight_scale` and
      `_weight_zero_point` [G, N], the second in the unit of the weights.

    `_weight_act_pre_scale` [K], if there is one, multiplies the inputs.
    """

    name = "torchao"
    suffixes = (
        "_weight_qdata",
        "_weight_scale",
        "_weight_zero_point",
        "_weight_scale_and_zero",
        "_weight_act_pre_scale",
        "_weight_act_quant_scale",
        "_weight_act_quant_zero_point",
        "_weight_per_tensor_scale",
        "_weight_act_per_tensor_scale",
    )

    def __init__(self, settings: Settings) -> None:
        kind = settings.get("quant_type")
        kind = kind.get("default") if isinstance(kind, Mapping) else kind
        self._needs_zeros = isinstance(kind, Mapping) and kind.get("_type") in _WITH_ZERO_POINTS

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("_weight_qdata", names) | self._with("_weight_scale", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        shape = module.shape("_weight_qdata")
        if len(shape) != 2:
            raise self._foreign(module, f"has shape {list(shape)}")
        if self._needs_zeros:
            module.shape("_weight_zero_point")  # without which the integers would be taken for symmetric ones
        return (shape[0], shape[1] * 2) if _is_pairs(module) else shape

    def matrix(self, module: Module) -> Integers | Codes | Tensor:
        (outputs, inputs), stored = self.shape(module), module.tensor("_weight_qdata")
        scales = module.tensor("_weight_scale")
        if scales.dtype not in SCALE_DTYPES or not scales.numel():
            raise module.wrong("_weight_scale", f"is {scales.dtype} {list(scales.shape)}, not floating-point numbers")
        matrix: Integers | Codes
        if stored.dtype in FLOATS_8:
            matrix = self._floats(module, stored, scales)
        elif stored.dtype not in (torch.int8, torch.uint8) or (stored.dtype == torch.uint8 and not _is_pairs(module)):
            raise self._foreign(module, f"is {stored.dtype}")
        else:
            matrix = self._integers(module, stored, scales, (outputs, inputs))
        if not module.has("_weight_act_pre_scale"):
            return matrix
        factors = module.tensor("_weight_act_pre_scale")
        if factors.numel() != inputs or factors.dtype not in SCALE_DTYPES:
            raise module.wrong("_weight_act_pre_scale", f"is {factors.dtype} {list(factors.shape)}, not [{inputs}]")
        return matrix.dequantized() * factors.float().view(-1)

    def _floats(self, module: Module, stored: Tensor, scales: Tensor) -> Codes:
        rows, columns = stored.shape
        if scales.numel() == 1:
            return coded(stored, scales.view(()))
        if scales.dim() != 2 or rows % scales.shape[0] or columns % scales.shape[1]:
            raise module.wrong("_weight_scale", f"has shape {list(scales.shape)} for a matrix [{rows}, {columns}]")
        return tiled(module, stored, scales, "_weight_scale", (rows // scales.shape[0], columns // scales.shape[1]))

    def _integers(self, module: Module, stored: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Integers:
        outputs, inputs = shape
        pairs = _is_pairs(module)
        grouped = scales.float().mT if pairs and scales.dim() == 2 else scales.float()
        grouped = grouped[:, None] if grouped.dim() == 1 else grouped
        if grouped.dim() != 2 or grouped.shape[0] != outputs or inputs % max(grouped.shape[1], 1):
            raise module.wrong("_weight_scale", f"has shape {list(scales.shape)} for a matrix [{outputs}, {inputs}]")
        zeros = module.tensor("_weight_zero_point").float() if module.has("_weight_zero_point") else None
        if zeros is not None and zeros.shape != scales.shape:
            raise module.wrong(
                "_weight_zero_point", f"has shape {list(zeros.shape)}, and the scales {list(scales.shape)}"
            )
        if pairs:
            assert zeros is not None
            halves = stored.view(torch.uint8)
            values = torch.stack([halves & 15, halves >> 4], -1).flatten(1) ^ 8  # signed integers, plus 8
            return Integers(values, grouped, 8 - zeros.T / grouped.where(grouped != 0, 1), 4)
        bits = 4 if bool(((stored >= -8) & (stored < 8)).all()) else 8
        middle = 1 << (bits - 1)
        offsets = torch.zeros_like(grouped) if zeros is None else zeros.view_as(grouped)
        return Integers((stored.short() + middle).to(torch.uint8), grouped, offsets + middle, bits)

    def _foreign(self, module: Module, why: str) -> Exception:
        return module.wrong(
            "_weight_qdata",
            f"{why}: Octavo reads torchao's Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor (int4 with "
            "int4_packing_format='plain'), not tensors packed for one kernel or in MX and NV formats",
        )


def _is_pairs(module: Module) -> bool:
    """Return whether a byte holds two integers of 4 bits: only then zero points are in the unit of the weights."""
    return module.has("_weight_zero_point") and module.tensor("_weight_zero_point").is_floating_point()
