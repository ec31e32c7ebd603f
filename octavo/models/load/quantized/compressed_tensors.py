"""The formats that llm-compressor writes (https://github.com/vllm-project/compressed-tensors)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.load.quantized.codes import Codes, coded, halves
from octavo.models.load.quantized.floats import from_e8m0
from octavo.models.load.quantized.fp8 import per_output, scale_dims, tiled
from octavo.models.load.quantized.gptq import check_groups, group_order, own_groups
from octavo.models.load.quantized.integers import Integers, unpack
from octavo.models.load.quantized.method import BYTES, FLOATS_8, SCALE_DTYPES, WORDS, Method, Module, Settings
from octavo.nn.weights import E2M1, Index, InputScale

_WIDE = (torch.float16, torch.bfloat16, torch.float32)
_BITS = (4, 8, 2, 3, 1, 5, 6, 7)
_PATTERN = "re:"
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
    - `weight` of 16 bits or more in the format "dense", whose scales are not needed.
    - `weight` int8 or of 8-bit floats, with `weight_scale` per matrix, output, group or tile. Floats with one per
      matrix or output also have an `input_scale`, if the configuration's `input_activations` have `dynamic` false.
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
        sparsity = (settings.get("sparsity_config") or {}).get("format")
        if sparsity not in (None, "dense"):
            raise ConfigError(
                f"quantization_config.sparsity_config.format is {sparsity!r}; Octavo reads no sparse weights. Serve "
                "another checkpoint of the model."
            )
        _check_rotations(settings)
        self._is_dense = "dense" in formats
        blocks = [(group.get("weights") or {}).get("block_structure") for group in groups]
        self._tile = tuple(next((block for block in blocks if block), (128, 128)))
        self._groups = list(groups)
        self.is_static = any(_has_input_scale(group) for group in groups)
        for target in (target for group in groups for target in _targets(group) if target.startswith(_PATTERN)):
            try:
                re.compile(target.removeprefix(_PATTERN))
            except re.error as error:
                raise ConfigError(
                    f"quantization_config.config_groups: the target {target!r} is not a regular expression: {error}. "
                    "Get the checkpoint's config.json again."
                ) from None

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("weight_packed", names) | self._with("weight_scale", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        if not module.has("weight_packed"):
            return module.shape("weight")
        if module.has("weight_shape"):
            rows, columns = module.stored("weight_shape", (torch.int32, torch.int64), 2).tolist()
            return rows, columns
        rows, columns = module.sizes("weight_packed")
        return rows, columns * 2

    def matrix(self, module: Module) -> Integers | Codes | Tensor:
        if not module.has("weight_packed"):
            kinds = (torch.int8, *FLOATS_8, *(_WIDE if self._is_dense else ()))
            weight = module.stored("weight", kinds, None, None)
            if weight.dtype in _WIDE:
                return weight.float()
            return self._unpacked(module, weight, module.tensor("weight_scale"))
        scales = module.tensor("weight_scale")
        packed = module.stored("weight_packed", WORDS + BYTES, None, None)
        if packed.dtype == torch.int32:
            return self._integers(module, packed, scales)
        rows, columns = self.shape(module)
        if scales.dtype == torch.uint8:
            exponents = module.stored("weight_scale", BYTES, rows, columns // 32)
            return coded(halves(packed), from_e8m0(exponents), E2M1)
        scales = module.stored("weight_scale", (torch.float8_e4m3fn,), rows, columns // 16)
        return coded(halves(packed), scales.float() / module.scale("weight_global_scale"), E2M1)

    def cut(self, module: Module, index: Index) -> Module | None:
        matrix, scales, groups = self.shape(module), module.shape("weight_scale"), "weight_g_idx"
        in_tiles = len(scales) == 2 and scales[0] != matrix[0] and (max(scales) > 1 or self._has_tiles(module))
        own = scale_dims(scales, matrix, self._tile if in_tiles else None)
        zeros = scale_dims(module.shape("weight_zero_point"), matrix, None) if module.has("weight_zero_point") else None
        if own is None:
            return None
        dims = {"weight": (0, 1), "weight_packed": (0, 1), "weight_scale": own, groups: (None, 0)}
        dims |= {"weight_zero_point": zeros or (0, 1)}
        cuts = self._cut_evenly(module, index, dims)
        if cuts is None:
            return None
        ordered = self._is_ordered(module)
        given = own_groups(module, groups, index[1], matrix[1], math.prod(scales[1:])) if ordered else {}
        if given is None:
            return None
        sizes = [len(range(size)[part]) for size, part in zip(matrix, index, strict=True)]
        return module.part(cuts, given | {"weight_shape": torch.tensor(sizes)})

    def _unpacked(self, module: Module, weight: Tensor, scales: Tensor) -> Integers | Codes:
        rows, columns = weight.shape
        if scales.dtype == torch.uint8:
            module.stored("weight", (torch.float8_e4m3fn,), rows, columns)
            return coded(weight, from_e8m0(module.stored("weight_scale", BYTES, rows, columns // 32)))
        is_tiled = scales.dim() == 2 and (
            scales.shape[1] > 1
            or 1 < scales.shape[0] < rows  # a rank's part, of a column of tiles
            or self._has_tiles(module)
        )
        if weight.dtype.is_floating_point:
            if is_tiled and scales.shape[0] == rows:
                check_groups(module, "weight_scale", columns, scales.shape[1])
                return coded(weight, module.stored("weight_scale", SCALE_DTYPES, rows, None))
            if is_tiled:
                return tiled(module, weight, scales, "weight_scale", self._tile)
            codes = coded(weight, per_output(module, weight, scales))
            return replace(codes, input_scale=self._input_scale(module))
        if is_tiled:
            scales = module.stored("weight_scale", SCALE_DTYPES, rows, None)
            check_groups(module, "weight_scale", columns, scales.shape[1])
        else:
            scales = per_output(module, weight, scales).expand(rows, 1)
        zeros = torch.full_like(scales, 128, dtype=torch.float32)
        if self._has_zeros(module):
            zeros = zeros + self._zeros(module, scales)
        return Integers((weight.short() + 128).to(torch.uint8), scales, zeros, 8)

    def _input_scale(self, module: Module) -> InputScale | None:
        """Return how to read the scale of a module's activations; None if the configuration says that it has none."""
        return partial(module.input_scale, "input_scale") if _has_input_scale(self._group_of(module)) else None

    def _zeros(self, module: Module, scales: Tensor) -> Tensor:
        """Return the zero points of int8, as float32 that broadcasts to the shape of the scales."""
        zeros = module.tensor("weight_zero_point")
        if zeros.numel() not in (1, scales.numel()) or zeros.dtype.is_floating_point:
            why = f"is {zeros.dtype} {list(zeros.shape)}, not int8 {list(scales.shape)}"
            raise module.wrong("weight_zero_point", why)
        return zeros.float().view(() if zeros.numel() == 1 else scales.shape)

    def _integers(self, module: Module, packed: Tensor, scales: Tensor) -> Integers:
        rows, columns = self.shape(module)
        if scales.dtype not in SCALE_DTYPES:
            raise module.wrong("weight_scale", f"is {scales.dtype} {list(scales.shape)}, not floating-point numbers")
        scales = scales.view(1, 1) if scales.numel() == 1 else scales
        stated = self._settings_of(module).get("num_bits")
        # Of few inputs, several numbers of bits fill as many words.
        possible = [bits for bits in _BITS if stated in (None, bits)]
        bits = next((bits for bits in possible if -(-columns * bits // 32) == packed.shape[1]), 0)
        fits = bits and packed.shape[0] == rows
        if not fits or scales.dim() != 2 or scales.shape[0] not in (1, rows):
            raise module.wrong(
                "weight_packed",
                f"has shape {list(packed.shape)}, and weight_scale {list(scales.shape)}, for "
                f"a matrix [{rows}, {columns}]",
            )
        groups = scales.shape[1]
        order = None
        if self._is_ordered(module):
            order = group_order(module, ("weight_scale", "weight_g_idx"), columns, groups, needed=True)
        check_groups(module, "weight_scale", columns, groups)
        zeros = torch.full((rows, groups), 1 << (bits - 1), dtype=torch.uint8)
        if self._has_zeros(module):
            stored = module.stored("weight_zero_point", WORDS, -(-rows * bits // 32), groups)
            zeros = unpack(stored.T, bits, rows).T
        return Integers(unpack(packed, bits, columns), scales.expand(rows, groups), zeros, bits, order)

    def _is_ordered(self, module: Module) -> bool:
        """Return whether inputs are assigned to groups; otherwise all numbers are -1."""
        if not module.has("weight_g_idx"):
            return self._settings_of(module).get("actorder") in ("group", "dynamic", True)
        groups = module.tensor("weight_g_idx")
        return not groups.numel() or bool((groups >= 0).any())

    def _has_tiles(self, module: Module) -> bool:
        return self._settings_of(module).get("strategy") == "block"

    def _has_zeros(self, module: Module) -> bool:
        """Return whether the module has zero points, or must have: without them, it would be read as symmetric."""
        return module.has("weight_zero_point") or self._settings_of(module).get("symmetric") is False

    def _settings_of(self, module: Module) -> Mapping[str, Any]:
        """Return how the configuration says that a module's weights are quantized; {} if none of its groups does."""
        return self._group_of(module).get("weights") or {}

    def _group_of(self, module: Module) -> Mapping[str, Any]:
        """Return the group of the configuration that names a module, or its class; {} if none does."""
        named = [group for group in self._groups if any(_names(target, module.name) for target in _targets(group))]
        classes = [group for group in self._groups if "Linear" in _targets(group)]
        found = named or classes
        return found[0] if found else {}


def _check_rotations(settings: Settings) -> None:
    """Raise ConfigError if activations are to be transformed; transforms of weights are part of the stored ones."""
    groups = ((settings.get("transform_config") or {}).get("config_groups") or {}).items()
    for name, location in [(name, one.get("location")) for name, group in groups for one in group.get("apply") or ()]:
        if location not in ("weight_input", "weight_output"):
            raise ConfigError(
                f"quantization_config.transform_config.config_groups.{name} is applied at {location!r}; Octavo has no "
                "transforms of activations. Serve another checkpoint of the model."
            )


def _has_input_scale(group: Mapping[str, Any]) -> bool:
    inputs = group.get("input_activations") or {}
    one = inputs.get("dynamic") is False and inputs.get("strategy") in (None, "tensor")
    return one and inputs.get("num_bits") == 8 and inputs.get("type") == "float"


def _targets(group: Mapping[str, Any]) -> Sequence[str]:
    return group.get("targets") or ()


def _names(target: str, module: str) -> bool:
    """Return whether a group's target is a module's name, or a pattern for it."""
    if target.startswith(_PATTERN):
        return bool(re.match(target.removeprefix(_PATTERN), module))
    return target == module
