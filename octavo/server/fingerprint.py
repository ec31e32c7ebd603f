"""`system_fingerprint`: identifies the system that computes the answers, so that clients can detect changes."""

from __future__ import annotations

import hashlib

import msgspec

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.version import __version__


def check_fingerprint(config: ServerConfig) -> None:
    """Check the settings of the fingerprint.

    Raises:
        ConfigError: a value is missing, or has no effect.
    """
    custom = config.fingerprint_mode == "custom"
    if custom and config.fingerprint_value is None:
        raise ConfigError("--fingerprint-mode custom needs --fingerprint-value, the text to show.")
    if not custom and config.fingerprint_value is not None:
        raise ConfigError("--fingerprint-value is shown only with --fingerprint-mode custom; add that.")


def fingerprint(config: ServerConfig, info: ModelInfo) -> str | None:
    """Return, depending on the settings, `octavo-<version>-<8 hexadecimal digits>`, the user's own text, or None.

    The digits are a hash of the model, the device, its kernels, and the formats of weights, activations and KV cache.
    With all of these and the seed equal, answers are repeatable as far as the device allows.
    """
    match config.fingerprint_mode:
        case "none":
            return None
        case "custom":
            return config.fingerprint_value
    computes = (info.name, info.architecture, info.device, info.dtype, info.weights, info.kernels, info.kv_form)
    return f"octavo-{__version__}-{hashlib.sha256(msgspec.json.encode(computes)).hexdigest()[:8]}"
