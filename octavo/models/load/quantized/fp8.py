"""Weights in 8-bit floating point, E4M3 or E5M2: DeepSeek's tiles of 128 x 128, AutoFP8's and ModelOpt's matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.load.quantized.codes import FLOATS, Codes, coded, halves
from octavo.models.load.quantized.method import BYTES, FLOATS_8, SCALE_DTYPES, Method, Module, Settings
from octavo.nn.weights import E2M1, Index, InputScale

_TILE = 128
_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
)
"""ModelOpt's `quant_algo`."""


class FP8(Method):
    """`weight` [N, K] in a dtype of 8 bits, with `weight_scale_inv` or `weight_scale` per matrix, output or tile.

    Both are factors. Their shape says which: one number without `weight_block_size`, or [], is for the matrix. So is
    the scale of activations, `input_scale` (AutoFP8) or `activation_scale` (Transformers), which is used if
    `activation_scheme` is "static", and weights have no tiles.
    """

    name = "FP8"
    suffixes: tuple[str, ...] = (
        "weight",
        "weight_scale_inv",
        "weight_scale",
        "input_scale",
        "input_scale_ub",
        "activation_scale",
        "output_scale",
    )

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError for tiles of no valid size."""
        self._states_tiles = bool(settings.get("weight_block_size"))
        tile = settings.get("weight_block_size") or (_TILE, _TILE)
        if not isinstance(tile, Sequence) or len(tile) != 2 or not all(type(size) is int and size > 0 for size in tile):
            raise ConfigError(
                f"quantization_config.weight_block_size is {tile!r}, not two sizes such as [128, 128]. Get the "
                "checkpoint's config.json again."
            )
        self._tile = tuple(tile)
        self.is_static = settings.get("activation_scheme") == "static"

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("weight_scale_inv", names) | self._with("weight_scale", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        return module.shape("weight")

    def matrix(self, module: Module) -> Codes | Tensor:
        weight = module.stored("weight", FLOATS_8, None, None)
        name = _scales_of(module)
        scales = module.tensor(name)
        if self._is_tiled(module, name):
            return tiled(module, weight, _rows_and_columns(scales), name, self._tile)
        codes = coded(weight, per_output(module, weight, scales, name))
        return replace(codes, input_scale=self._input_scale(module))

    def _is_tiled(self, module: Module, name: str) -> bool:
        """Return whether scales are those of tiles, by their shape."""
        stored = module.shape(name)
        if math.prod(stored) == 1:
            return name == "weight_scale_inv" and self._states_tiles and len(stored) == 2
        per_tile = [-(-size // part) for size, part in zip(self.shape(module), self._tile, strict=True)]
        return name == "weight_scale_inv" or per_tile in ([*stored], [*stored[::2]])

    def _input_scale(self, module: Module) -> InputScale | None:
        if not self.is_static:
            return None
        return partial(module.input_scale, "activation_scale" if module.has("activation_scale") else "input_scale")

    def cut(self, module: Module, index: Index) -> Module | None:
        name = _scales_of(module)
        tile = self._tile if self._is_tiled(module, name) else None
        dims = scale_dims(module.shape(name), self.shape(module), tile)
        cuts = None if dims is None else self._cut_evenly(module, index, {"weight": (0, 1), name: dims})
        return None if cuts is None else module.part(cuts, {})


class ModelOpt(FP8):
    """NVIDIA ModelOpt's: FP8 per matrix, output or tile, or NVFP4: `weight` [N, K / 2] of pairs, `weight_scale`
    [N, K / 16] in E4M3, `weight_scale_2` for all. `pre_quant_scale` [K], if there is one, multiplies the inputs."""

    name = "ModelOpt"
    suffixes = (*FP8.suffixes, "weight_scale_2", "pre_quant_scale")

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError for other algorithms."""
        super().__init__(settings)
        _check_algorithm("quant_algo", settings)
        for name, layer in (settings.get("quantized_layers") or {}).items():
            _check_algorithm(f"quantized_layers.{name}.quant_algo", layer)
        groups = (settings.get("config_groups") or {}).values()
        self._dynamic = any((group.get("input_activations") or {}).get("dynamic") is True for group in groups)
        self.is_static = settings.get("quant_algo") == "FP8"

    def shape(self, module: Module) -> tuple[int, ...]:
        rows, columns = module.sizes("weight")
        return (rows, columns * 2) if module.has("weight_scale_2") else (rows, columns)

    def matrix(self, module: Module) -> Codes | Tensor:
        codes = self._pairs(module) if module.has("weight_scale_2") else super().matrix(module)
        if not module.has("pre_quant_scale"):
            return codes
        factors = module.stored("pre_quant_scale", SCALE_DTYPES, self.shape(module)[1])
        return (codes.dequantized() if isinstance(codes, Codes) else codes) * factors.float()

    def cut(self, module: Module, index: Index) -> Module | None:
        return None if module.has("pre_quant_scale") else super().cut(module, index)

    def _pairs(self, module: Module) -> Codes:
        rows, columns = self.shape(module)
        scales = module.stored("weight_scale", (torch.float8_e4m3fn,), rows, columns // 16)
        pairs = module.stored("weight", BYTES, rows, columns // 2)
        return coded(halves(pairs), scales.float() * module.scale("weight_scale_2"), E2M1)

    def _input_scale(self, module: Module) -> InputScale | None:
        """Without `quant_algo` of all modules, those with a scale are static."""
        if self._dynamic or not (self.is_static or module.has("input_scale")):
            return None
        return partial(module.input_scale, "input_scale")


def _check_algorithm(key: str, settings: Settings) -> None:
    """Raise ConfigError for a ModelOpt algorithm that is not read."""
    algorithm = settings.get("quant_algo")
    if algorithm and str(algorithm).upper() not in _ALGORITHMS:
        raise ConfigError(
            f"quantization_config.{key} is {algorithm!r}; Octavo reads {', '.join(_ALGORITHMS)} of ModelOpt. Serve "
            "another checkpoint of the model."
        )


def scale_dims(
    scales: Sequence[int], matrix: Sequence[int], tile: Sequence[int] | None
) -> tuple[int | None, int | None] | None:
    """Return the dimensions of outputs and of inputs in scales of this shape, for a matrix of this shape; None if they
    can't be cut.

    Args:
        tile: outputs and inputs that have a scale; None for scales of outputs, of groups of inputs, or of the matrix.
    """
    if tile is not None:
        divides = not any(n % size for n, size in zip(matrix, tile, strict=True))
        return (0, 1) if divides and [n // size for n, size in zip(matrix, tile, strict=True)] == [*scales] else None
    if math.prod(scales) == 1:
        return None, None
    if scales[0] != matrix[0] or len(scales) > 2:
        return None
    return 0, 1 if len(scales) == 2 else None


def tiled(module: Module, weight: Tensor, scales: Tensor, suffix: str, tile: tuple[int, ...]) -> Codes:
    """Return weight [N, K] with the scales of tiles of this size.

    Raises:
        ModelFileError: there is another number of scales.
    """
    expected = [-(-size // part) for size, part in zip(weight.shape, tile, strict=True)]
    if list(scales.shape) != expected or scales.dtype not in SCALE_DTYPES:
        raise module.wrong(suffix, _wrong_scales(scales, f"tiles of {tile[0]} x {tile[1]} have {expected}"))
    rows = scales.float().repeat_interleave(tile[0], 0)[: weight.shape[0]]
    return Codes(weight.view(torch.uint8), rows, tile[1], FLOATS[weight.dtype])


def per_output(module: Module, weight: Tensor, scales: Tensor, suffix: str = "weight_scale") -> Tensor:
    """Return scales of a matrix, [] or [N, 1].

    Args:
        scales: [], [1] or [1, 1] for the matrix; [N], [N, 1] or [1, N] for its outputs.

    Raises:
        ModelFileError: they are for something else.
    """
    outputs = weight.shape[0]
    shapes = ((), (1,), (1, 1), (outputs,), (outputs, 1), (1, outputs))
    if scales.shape not in shapes or scales.dtype not in SCALE_DTYPES:
        raise module.wrong(suffix, _wrong_scales(scales, f"{outputs} outputs have [{outputs}, 1]"))
    return scales.view(()) if scales.numel() == 1 else scales.reshape(-1, 1)


def _scales_of(module: Module) -> str:
    return "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"


def _rows_and_columns(scales: Tensor) -> Tensor:
    """Return scales of tiles as [rows, columns], which ModelOpt stores as [rows, 1, columns, 1]."""
    return scales.flatten(2).flatten(0, 1) if scales.dim() == 4 and scales.shape[1::2] == (1, 1) else scales


def _wrong_scales(scales: Tensor, expected: str) -> str:
    return f"is {str(scales.dtype).removeprefix('torch.')} {list(scales.shape)}; {expected} floating-point numbers"
