"""`Bridge`: the implementation of models by `transformers`' modules. Imports the library only where it is used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError
from octavo.features.bridge.settings import BridgeSettings
from octavo.models.encoders.registry import is_encoder
from octavo.models.hf_config import OtherValueError
from octavo.models.load.quantized.table import method_of
from octavo.models.registry import ARCHITECTURES, is_own, spec_of, unknown

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.features.bridge.build import Bridge
    from octavo.hub.files import ModelFiles

log = logging.getLogger(__name__)


def implementation(config: EngineConfig, files: ModelFiles) -> Bridge | None:
    """Return the bridge if the settings ask for it, or if Octavo itself lacks the architecture.

    Raises:
        ConfigError: transformers is not installed or can't build the model, or a setting or a field of the model's
            config doesn't go with what the settings ask for.
    """
    settings = next((one for one in config.features.values() if isinstance(one, BridgeSettings)), BridgeSettings())
    own = is_own(files.config) or is_encoder(files.config)
    names = files.config.get("architectures") or []
    if settings.model_impl == "octavo" or (own and settings.model_impl == "auto"):
        if settings.compilation:
            raise ConfigError(
                f"--compilation: {files.name} is computed by Octavo's own layers, which are fused kernels and programs "
                "already. Leave it out; it is for models that the modules of transformers compute."
            )
        if not own and names:
            raise ConfigError(f"{unknown(names[0])} Leave out --model-impl octavo to try the modules of transformers.")
        if own and names[0] in ARCHITECTURES and files.format != "gguf" and not is_encoder(files.config):
            _check_fields(files.config)
        return None
    if not names:
        return None  # Octavo's own error says what is missing
    if is_encoder(files.config):
        raise ConfigError(
            f"--model-impl transformers: {files.name} attends in both directions, and the modules of transformers are "
            "for models that generate text. Leave it out; Octavo computes it by its own layers."
        )
    _check_settings(config, files)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(_not_installed(files.config, own=own)) from error
    from octavo.features.bridge.build import Bridge

    overrides = config.model.config_overrides
    bridge = Bridge(
        transformers.__version__,
        files,
        trusts_code=settings.trust_remote_code,
        compiles=settings.compilation,
        overrides=overrides,
    )
    log.info(
        "%s is computed by the modules of %s%s, with Octavo's attention, KV cache and linear layers",
        files.config["architectures"][0],
        bridge.name,
        ", compiled by torch" if settings.compilation else "",
    )
    return bridge


def _check_fields(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the bridge as its remedy, for a field that Octavo's own layers don't support."""
    try:
        spec_of(config)
    except OtherValueError as error:
        raise ConfigError(f"{error} Set --model-impl transformers to try the modules of transformers.") from None


def _check_settings(config: EngineConfig, files: ModelFiles) -> None:
    """Raise ConfigError for settings that the bridge doesn't support."""
    kept = config.cache.kv_cache_dtype
    if kept.startswith("fp8"):
        raise ConfigError(
            f"--kv-cache-dtype {kept}: keys and values are stored in FP8 only for Octavo's own implementations, and "
            f"{files.name} is computed by transformers' modules. Leave it out."
        )
    method_of(files.config)
    if files.format == "gguf":
        raise ConfigError(
            f"{files.name} is a GGUF file, and with transformers' modules Octavo reads safetensors only. Leave out "
            "--model-impl, or serve the model's safetensors."
        )


def _not_installed(config: Mapping[str, object], *, own: bool) -> str:
    architectures = config.get("architectures")
    name = str(architectures[0] if isinstance(architectures, list) else architectures)
    remedy = "pip install 'octavo[transformers]'"
    if own:
        return f"--model-impl transformers needs the package transformers, which is not installed: {remedy}"
    return f"{unknown(name)} Others are computed by the modules of transformers, which is not installed: {remedy}"
