"""The formats that llm-compressor writes (https://github.com/vllm-project/compressed-tensors)."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.load.quantized.codes import E2M1, Codes, coded, halves
from octavo.models.load.quantized.floats import from_e8m0
from octavo.models.load.quantized.fp8 import per_output, tiled
from octavo.models.load.quantized.gptq import check_groups, group_order
from octavo.models.load.quantized.integers import Integers, unpack
from octavo.models.load.quantized.method import Method, Module, Settings

_READ = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)


class CompressedTensors(Method):
    """The dtype of a module's tensors says its format, so a checkpoint may mix several.

    - `weight_packed` int32: integers of 1 to 8 bits in a stream, with an offset of half their range.
    - `weight_packed` uint8: pairs of E2M1; scales per 16 (NVFP4, divided by `weight_global_scale`) or 32 (MXFP4).
    - `weight` int8 or of 8-bit floats, with `weight_scale` per matrix, output, group or tile.
    """

    name = "compressed-tensors"
    suffixes = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "output_scale",
    )

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError for formats that are not read."""
        groups = (settings.get("config_groups") or {}).values()
        formats = {settings.get("format"), *(group.get("format") for group in groups)} - {None}
        unknown = sorted(formats - set(_READ))
        if unknown:
            raise ConfigError(
                f"quantization_config.format is {unknown[0]!r}; Octavo reads {', '.join(_READ)} of compressed-tensors. "
                "Serve another checkpoint of the model."
            )
        blocks = [(group.get("weights") or {}).get("block_structure") for group in groups]
        self._tile = tuple(next((block for block in blocks if block), (128, 128)))

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("weight_packed", names) | self._with("weight_scale", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        if not module.has("weight_packed"):
            return module.shape("weight")
        if module.has("weight_shape"):
            return tuple(module.tensor("weight_shape").tolist())
        rows, columns = module.shape("weight_packed")
        return rows, columns * 2

    def matrix(self, module: Module) -> Integers | Codes:
        scales = module.tensor("weight_scale")
        if not module.has("weight_packed"):
            return self._unpacked(module, module.tensor("weight"), scales)
        packed = module.tensor("weight_packed")
        if packed.dtype == torch.int32:
            return self._integers(module, packed, scales)
        if packed.dtype != torch.uint8:
            raise module.wrong("weight_packed", f"is {packed.dtype}, neither int32 nor uint8")
        if scales.dtype == torch.uint8:
            return coded(halves(packed), from_e8m0(scales), E2M1)
        return coded(halves(packed), scales.float() / module.tensor("weight_global_scale").float(), E2M1)

    def _unpacked(self, module: Module, weight: Tensor, scales: Tensor) -> Integers | Codes:
        if scales.dtype == torch.uint8:
            return coded(weight, from_e8m0(scales))
        is_tiled = scales.dim() == 2 and scales.shape[1] > 1
        if weight.dtype.is_floating_point:
            if is_tiled and scales.shape[0] == weight.shape[0]:
                return coded(weight, scales)
            if is_tiled:
                return tiled(module, weight, scales, "weight_scale", self._tile)
            return coded(weight, per_output(module, weight, scales))
        if weight.dtype != torch.int8:
            raise module.wrong("weight", f"is {weight.dtype}, neither int8 nor of 8-bit floats")
        if not is_tiled:
            scales = per_output(module, weight, scales).expand(weight.shape[0], 1)
        zeros = torch.full_like(scales, 128, dtype=torch.float32)
        if module.has("weight_zero_point"):
            zeros = zeros + module.tensor("weight_zero_point").float()
        return Integers((weight.short() + 128).to(torch.uint8), scales, zeros, 8)

    def _integers(self, module: Module, packed: Tensor, scales: Tensor) -> Integers:
        rows, columns = self.shape(module)
        scales = scales.view(1, 1) if scales.numel() == 1 else scales
        words = packed.shape[1]
        bits = next((bits for bits in range(1, 9) if -(-columns * bits // 32) == words), 0)
        if not bits or packed.shape[0] != rows or scales.dim() != 2 or scales.shape[0] not in (1, rows):
            raise module.wrong(
                "weight_packed",
                f"has shape {list(packed.shape)}, and weight_scale {list(scales.shape)}, for "
                f"a matrix [{rows}, {columns}]",
            )
        groups = scales.shape[1]
        order = group_order(module, "weight_g_idx", columns, groups) if self._is_ordered(module) else None
        check_groups(module, "weight_scale", columns, groups)
        zeros = torch.full((rows, groups), 1 << (bits - 1), dtype=torch.uint8)
        if module.has("weight_zero_point"):
            zeros = unpack(module.tensor("weight_zero_point").T, bits, rows).T
        return Integers(unpack(packed, bits, columns), scales.expand(rows, groups), zeros, bits, order)

    def _is_ordered(self, module: Module) -> bool:
        """Return whether inputs are assigned to groups; otherwise all numbers are -1."""
        return module.has("weight_g_idx") and bool((module.tensor("weight_g_idx") >= 0).any())
