"""Configurations of models with images or sound, which have that of their text model inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NESTED = ("text_config", "llm_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the nested configuration of the text model; the configuration itself if it has none."""
    return next((config[name] for name in _NESTED if config.get(name)), config)


def stored_dtype(config: Mapping[str, Any]) -> Any:
    """Return the name of the dtype that a configuration states for weights; None if it states none."""
    stated = (one.get(name) for one in (config, text_config(config)) for name in ("dtype", "torch_dtype"))
    return next((name for name in stated if name), None)
