"""Reading Hugging Face configurations: fields, defaults, and refusal of unsupported features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.spec import DecoderSpec
from octavo.nn.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

Config = Mapping[str, Any]


def require(config: Config, name: str) -> Any:
    """Return a field without a default.

    Raises:
        ModelFileError: the field is missing or null.
    """
    value = config.get(name)
    if value is None:
        raise ModelFileError(f"The model's config has no '{name}', which this architecture needs.")
    return value


def whole(config: Config, name: str, default: int | None = None) -> int:
    """Return a positive integer field, which is required if it has no default.

    Raises:
        ModelFileError: the field is missing and has no default, or is not a positive whole number.
    """
    value = require(config, name) if default is None else value_or(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFileError(f"The model's config has {name}={value!r}, which should be a positive whole number.")
    return value


def value_or(config: Config, name: str, default: Any) -> Any:
    """Return a field, or its default if it is missing or null."""
    value = config.get(name)
    return default if value is None else value


def only(config: Config, name: str, supported: Any) -> None:
    """Refuse a feature by name.

    Raises:
        ConfigError: the field has another value than the only supported one.
    """
    value = value_or(config, name, supported)
    if value != supported:
        raise ConfigError(f"The model's config asks for {name}={value!r}; Octavo supports {supported!r} only.")


def rope_spec(config: Config, head_dim: int) -> RopeSpec:
    """Return rotary settings, from `rope_parameters` (newer configs) or `rope_theta` and `rope_scaling` (older ones).

    Raises:
        ConfigError: an unsupported rope type or rotary fraction.
    """
    params = dict(value_or(config, "rope_parameters", None) or value_or(config, "rope_scaling", {}))
    nested = [key for key, value in params.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(
            f"The model's config has rope parameters per layer type ({', '.join(nested)}); "
            "Octavo supports one set for all layers."
        )
    for source in (params, config):
        only(source, "partial_rotary_factor", 1.0)
    kind = params.get("rope_type") or params.get("type") or "default"
    theta = float(params.get("rope_theta") or value_or(config, "rope_theta", 10000.0))
    limit = whole(config, "max_position_embeddings")
    match kind:
        case "default":
            return RopeSpec(head_dim, limit, theta)
        case "linear":
            return RopeSpec(head_dim, limit, theta, LinearScaling(float(_rope(params, kind, "factor"))))
        case "llama3":
            return RopeSpec(head_dim, limit, theta, _llama3(params, config, limit))
        case "yarn":
            scaling = _yarn(params, config, limit)
            # A config may give the context before or after scaling; the table must cover the longer one.
            limit = max(limit, int(scaling.original_max_position * scaling.factor))
            return RopeSpec(head_dim, limit, theta, scaling)
    raise ConfigError(f"The model's config asks for rope type '{kind}'; Octavo supports {', '.join(ROPE_TYPES)}.")


def _rope(params: Config, kind: str, name: str) -> Any:
    value = params.get(name)
    if value is None:
        raise ModelFileError(
            f"The model's config has no '{name}' among its rope parameters, which rope type '{kind}' needs."
        )
    return value


def _original(params: Config, config: Config, limit: int) -> int:
    return int(
        config.get("original_max_position_embeddings") or params.get("original_max_position_embeddings") or limit
    )


def _llama3(params: Config, config: Config, limit: int) -> Llama3Scaling:
    factor, low, high = (float(_rope(params, "llama3", f"{name}factor")) for name in ("", "low_freq_", "high_freq_"))
    return Llama3Scaling(factor, low, high, _original(params, config, limit))


def _yarn(params: Config, config: Config, limit: int) -> YarnScaling:
    original = _original(params, config, limit)
    factor = float(params.get("factor") or limit / original)
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(factor, params.get("mscale"), params.get("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=float(attention_factor),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
    )


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return 0.1 ln(factor) + 1, the YaRN paper's temperature; some configs give it as a ratio of two weighted ones."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def decoder_spec(
    config: Config,
    *,
    windows: Sequence[int | None],
    head_dim: int | None = None,
    biases: frozenset[str] = frozenset(),
    qk_norm: bool = False,
) -> DecoderSpec:
    """Return the spec from the fields that all families of the standard block share; the caller adds the rest.

    Raises:
        ModelFileError: a field is missing, or two contradict each other.
        ConfigError: a feature is not supported.
    """
    if value_or(config, "hidden_act", "silu") != "swish":
        only(config, "hidden_act", "silu")
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    kv_heads = whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelFileError(
            f"The model's config has num_attention_heads={heads}, not a multiple of num_key_value_heads={kv_heads}."
        )
    head_dim = whole(config, "head_dim", head_dim or hidden // heads)
    return DecoderSpec(
        hidden_size=hidden,
        num_layers=whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=whole(config, "intermediate_size"),
        vocab_size=whole(config, "vocab_size"),
        rms_norm_eps=float(value_or(config, "rms_norm_eps", 1e-6)),
        rope=rope_spec(config, head_dim),
        windows=tuple(windows),
        biases=biases,
        qk_norm=qk_norm,
        tied=bool(value_or(config, "tie_word_embeddings", False)),
    )


def layer_windows(config: Config) -> list[int | None]:
    """Return each layer's window: by `layer_types` if given, else for the layers from `max_window_layers` on.

    Raises:
        ConfigError: a layer type is not supported.
        ModelFileError: `layer_types` has the wrong length.
    """
    layers = whole(config, "num_hidden_layers")
    window = whole(config, "sliding_window", 4096) if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = value_or(config, "max_window_layers", 28)
        return [window if i >= first else None for i in range(layers)]
    if len(types) != layers:
        raise ModelFileError(f"The model's config lists {len(types)} layer_types for {layers} layers.")
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ConfigError(
            f"The model's config has layers of type {', '.join(unknown)}; Octavo supports {', '.join(known)}."
        )
    return [known[kind] for kind in types]
