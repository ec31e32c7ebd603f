"""Defaults of sampling parameters, from the model's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.params import RepetitionDetection, SamplingParams

# generation_config.json's name -> ours
SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "repetition_detection": "repetition_detection",
}
_MAY_BE_NONE = {
    "seed",
    "stop",
    "stop_token_ids",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "repetition_detection",
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a checkpoint's generation_config.json sets.

    Raises:
        ConfigError: a value is out of range.
    """
    defaults = {
        ours: generation_config[theirs]
        for theirs, ours in SAMPLING_DEFAULTS.items()
        if generation_config.get(theirs) is not None
    }
    try:
        if "repetition_detection" in defaults:
            defaults["repetition_detection"] = msgspec.convert(defaults["repetition_detection"], RepetitionDetection)
        SamplingParams(**defaults)
    except (InvalidRequestError, TypeError, msgspec.ValidationError) as exc:
        raise ConfigError(
            f"A sampling default can't be used: {exc} It comes from the model's generation_config.json or from "
            "--override-generation-config; correct it there."
        ) from exc
    return defaults


def with_defaults(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> SamplingParams:
    """Return `SamplingParams` from defaults and a request's own fields; None means unset in fields that can't be None.

    The default of `repetition_detection` is not used for beams, which don't support it, nor with `ignore_eos`, which
    requests a fixed number of tokens.

    Raises:
        InvalidRequestError: a field is out of range.
    """
    chosen = {name: value for name, value in overrides.items() if value is not None or name in _MAY_BE_NONE}
    if chosen.get("ignore_eos") or chosen.get("beam_width"):
        chosen.setdefault("repetition_detection", None)
    return SamplingParams(**{**defaults, **chosen})
