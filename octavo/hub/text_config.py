"""Configurations of models with images or sound, which have that of their text model inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NESTED = ("text_config", "llm_config")
_OUTER = "thinker_config"
"""Where models that also speak have the configuration of what reads and writes."""
_QUANTIZATION = ("quantization_config", "compression_config")
_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
_SAME = {"intel/auto-round": "auto-round", "fbgemm_fp8": "fp8"}
"""Methods that store weights as another one does."""


def with_halves(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with those of its halves directly inside."""
    outer = config.get(_OUTER)
    if not isinstance(outer, Mapping):
        return config
    return {**config, **outer, "architectures": config.get("architectures")}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the nested configuration of the text model; the configuration itself if it has none."""
    whole = with_halves(config)
    return next((whole[name] for name in _NESTED if whole.get(name)), config)


def stored_dtype(config: Mapping[str, Any]) -> Any:
    """Return the name of the dtype that a configuration states for weights; None if it states none."""
    stated = (one.get(name) for one in (with_halves(config), text_config(config)) for name in ("dtype", "torch_dtype"))
    return next((name for name in stated if name), None)


def quantization_config(config: Mapping[str, Any]) -> Any:
    """Return what a configuration, or that of its text model, says of quantized weights; {} if nothing.

    Settings without a method are those of bitsandbytes, which had none at first.
    """
    stated = (one.get(name) for one in (with_halves(config), text_config(config)) for name in _QUANTIZATION)
    settings: Any = next((found for found in stated if found), {})
    if not isinstance(settings, Mapping):
        return settings
    default = "bitsandbytes" if any(map(settings.get, _BITSANDBYTES)) else None
    method = settings.get("quant_method", default)
    return {**settings, "quant_method": _SAME.get(method, method)} if isinstance(method, str) else settings
