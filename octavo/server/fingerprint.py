"""`system_fingerprint`: a name for what computes the answers, by which clients see that it has changed."""

from __future__ import annotations

import hashlib

import msgspec

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.version import __version__


def check_fingerprint(config: ServerConfig) -> None:
    """
    Raises:
        ConfigError: a value is missing, or given where it has no use.
    """
    custom = config.fingerprint_mode == "custom"
    if custom and config.fingerprint_value is None:
        raise ConfigError("--fingerprint-mode custom needs --fingerprint-value, the text to show.")
    if not custom and config.fingerprint_value is not None:
        raise ConfigError("--fingerprint-value is shown only with --fingerprint-mode custom; add that.")


def fingerprint(config: ServerConfig, info: ModelInfo) -> str | None:
    """As the settings want it: `octavo-<version>-<8 hexadecimal digits>`, their own text, or none.

    The digits stand for the model, the device, its kernels, and the forms of weights, activations and KV cache. With
    the same of them all, and the same seed, a request has the same answer as far as that can be had.
    """
    match config.fingerprint_mode:
        case "none":
            return None
        case "custom":
            return config.fingerprint_value
    computes = (info.name, info.architecture, info.device, info.dtype, info.weights, info.kernels, info.kv_form)
    return f"octavo-{__version__}-{hashlib.sha256(msgspec.json.encode(computes)).hexdigest()[:8]}"
