"""User overrides of a model's configuration, applied before it is first read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.hub.token_numbers import token_numbers

ROPE_SETTINGS = ("rope_parameters", "rope_scaling", "rope_theta")
_ROPE_KINDS = ("rope_type", "type")
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
)
_ROPE_FIELDS = (*_ROPE_KINDS, *_ROPE_NUMBERS, "truncate")


def with_overrides(files: ModelFiles, overrides: Mapping[str, Any]) -> ModelFiles:
    """Return the model with some fields of its configuration replaced.

    A nested configuration (`text_config`) is merged with the given one; any other value replaces the model's. Rotary
    settings may use the newer or the older field names, independent of the model's. The model's `rope_theta` is kept
    unless a new one is given.

    Raises:
        ConfigError: a value is invalid for its field; the text names the field.
    """
    if not overrides:
        return files
    for name, value in overrides.items():
        _check_kind(name, value, files.config.get(name))
    made = dict(files.config)
    for name, value in overrides.items():
        mine = made.get(name)
        if name.endswith("_config") and isinstance(mine, Mapping) and isinstance(value, Mapping):
            made[name] = {**mine, **value}
        else:
            made[name] = value
    if overrides.get("classifier_from_token") is not None:
        made["classifier_from_token"] = token_numbers(files, overrides["classifier_from_token"])
    if any(name in overrides for name in ROPE_SETTINGS):
        made = _with_rope(made, files.config, overrides)
    return replace(files, config=made, own_fields=frozenset(files.config))


def _with_rope(made: dict[str, Any], config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    own = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = [name for name in ROPE_SETTINGS[:2] if name in overrides]
    if len(given) > 1:
        raise _wrong("rope_scaling", "rope_parameters is overridden too; give one of them")
    params = dict(_checked_rope(given[0], overrides[given[0]]) if given else own)
    theta = overrides.get("rope_theta") or params.get("rope_theta") or own.get("rope_theta") or config.get("rope_theta")
    made.pop("rope_scaling", None)
    return made | {"rope_parameters": params} | ({} if theta is None else _with_theta(params, theta))


def _with_theta(params: dict[str, Any], theta: float) -> dict[str, Any]:
    return {"rope_parameters": params | {"rope_theta": theta}, "rope_theta": theta}


def _checked_rope(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(name, f"{value!r} must be an object such as {{'rope_type': 'yarn', 'factor': 4.0}}")
    unknown = next((field for field in value if field not in _ROPE_FIELDS), None)
    if unknown is not None:
        raise _wrong(name, f"there is no rotary setting {unknown!r}; those are {', '.join(_ROPE_FIELDS)}")
    for field in _ROPE_NUMBERS:
        number = value.get(field)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or number <= 0):
            raise _wrong(name, f"{field}={number!r} must be a number over 0")
    if set(value) - {"rope_theta"} and not any(value.get(kind) for kind in _ROPE_KINDS):
        raise _wrong(name, "it has no rope_type; add one, such as 'rope_type': 'yarn'")
    return value


def _check_kind(name: str, value: Any, mine: Any) -> None:
    """Raise ConfigError unless a value has the type of the model's own value, or is null."""
    if name == "rope_theta" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise _wrong(name, f"{value!r} must be a number over 0")
    if value is None or mine is None or name in ROPE_SETTINGS:
        return
    for kind, words in ((bool, "true or false"), (int | float, "a number"), (str, "a text")):
        if isinstance(mine, kind):
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise _wrong(name, f"{value!r} must be {words}, as the model's own {mine!r} is")
            return


def _wrong(name: str, problem: str) -> ConfigError:
    return ConfigError(f"--hf-overrides {name}: {problem}.")
