"""Which method a checkpoint's `quantization_config` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.errors import ConfigError
from octavo.hub.text_config import quantization_config
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.quantized.awq import AWQ
from octavo.models.load.quantized.bitsandbytes import BitsAndBytes
from octavo.models.load.quantized.compressed_tensors import CompressedTensors
from octavo.models.load.quantized.fp8 import FP8, ModelOpt
from octavo.models.load.quantized.gptq import GPTQ
from octavo.models.load.quantized.hqq import HQQ
from octavo.models.load.quantized.method import Method, Settings
from octavo.models.load.quantized.mxfp4 import MXFP4
from octavo.models.load.quantized.torchao import TorchAO
from octavo.models.load.quantized.view import QuantizedCheckpoint

_ROTATIONS = ("rotation_config", "spinquant_config", "transform_config")
"""AutoRound's settings of rotations."""


def _auto_round(settings: Settings) -> Method:
    """AutoRound (https://arxiv.org/abs/2309.05516) writes other methods' layouts.

    Raises:
        ConfigError: the layout is not read, or activations are to be rotated.
    """
    for key in _ROTATIONS:
        if settings.get(key):
            raise ConfigError(
                f"quantization_config.{key} is {settings[key]!r}; Octavo has no rotations of activations. Serve "
                "another checkpoint of the model."
            )
    layout = settings.get("packing_format", "auto_round:auto_gptq")
    if layout not in _LAYOUTS:
        raise ConfigError(
            f"quantization_config.packing_format is {layout!r}; Octavo reads {', '.join(_LAYOUTS)} of AutoRound. "
            "Serve another checkpoint of the model."
        )
    return _LAYOUTS[layout](settings)


def _gptq_1(settings: Settings) -> Method:
    return GPTQ({**settings, "checkpoint_format": "gptq"})


def _gptq_2(settings: Settings) -> Method:
    return GPTQ({**settings, "checkpoint_format": "gptq_v2"})


_LAYOUTS: Mapping[str, Callable[[Settings], Method]] = {
    "auto_round": _gptq_2,
    "auto_round:auto_awq": AWQ,
    "auto_round:auto_gptq": _gptq_1,
    "auto_round:gptqmodel": _gptq_2,
    "auto_round:llm_compressor": CompressedTensors,
}
METHODS: Mapping[str, Callable[[Settings], Method]] = {
    "auto-round": _auto_round,
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "gptq": GPTQ,
    "hqq": HQQ,
    "modelopt": ModelOpt,
    "mxfp4": MXFP4,
    "torchao": TorchAO,
}
"""`quant_method` -> what reads it."""


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Return what reads a checkpoint with this configuration; None if it is not quantized.

    Raises:
        ConfigError: the method, or a setting of it, is not supported.
    """
    settings = quantization_config(config)
    if not settings:
        return None
    name = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(
            f"quantization_config.quant_method is {name!r}; Octavo reads {', '.join(METHODS)}, and GGUF files. Serve "
            "another checkpoint of the model."
        )
    return METHODS[name](settings)


def dequantizing(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint as one of plain matrices; the same if it is not quantized."""
    method = method_of(config)
    return checkpoint if method is None else QuantizedCheckpoint(checkpoint, method)


def has_input_scales(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has static scales of activations, by its configuration. Raises as `method_of`."""
    method = method_of(config)
    return method is not None and method.is_static


def rounds_activations(config: Mapping[str, Any]) -> bool:
    """Return whether activations are to be rounded to 8 bits, as the weights are, by a checkpoint's configuration."""
    settings = quantization_config(config)
    if settings.get("quant_method") in ("fp8", "modelopt"):
        return True
    groups = (settings.get("config_groups") or {}).values()
    activations = [group.get("input_activations") or {} for group in groups]
    return bool(activations) and all(one.get("num_bits") == 8 for one in activations)
