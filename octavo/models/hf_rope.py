"""Reading rotary settings of Hugging Face configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.hf_config import Config, value_or, whole
from octavo.nn.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "yarn", "proportional")


def rope_spec(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10000.0,
    rotated: float = 1.0,
    interleaved: bool = False,
    backwards: bool = False,
    layer_type: str | None = None,
    stretched: bool = False,
    sections: Sequence[int] = (),
) -> RopeSpec:
    """Return rotary settings, from `rope_parameters` (newer configs) or `rope_theta` and `rope_scaling` (older ones).

    Args:
        theta, rotated: the family's default base, and fraction of rotated channels.
        interleaved: the family pairs adjacent channels.
        backwards: the family rotates by negative angles.
        layer_type: whose parameters to read, if they are given per layer type.
        stretched: the family's `max_position_embeddings` is the context after linear scaling, not before.
        sections: the family's default of `mrope_section`, whose axes alternate.

    Raises:
        ConfigError: an unsupported rope type.
        ModelFileError: a field is missing or impossible.
    """
    params = dict(value_or(config, "rope_parameters", None) or value_or(config, "rope_scaling", {}))
    nested = [key for key, value in params.items() if isinstance(value, Mapping)]
    if nested and layer_type is None:
        raise ConfigError(
            f"The model's config has rope parameters per layer type ({', '.join(nested)}); "
            "this architecture has one set for all layers."
        )
    if nested:
        params = dict(params.get(layer_type or "") or {})
    fraction = float(value_or(params, "partial_rotary_factor", value_or(config, "partial_rotary_factor", rotated)))
    proportional = params.get("rope_type") == "proportional"
    width = head_dim if proportional else int(head_dim * fraction + 1e-6)  # a quotient may be rounded down
    if width < 2 or width > head_dim or width % 2:
        raise ModelFileError(
            f"The model's config has partial_rotary_factor={fraction}, which makes {width} of {head_dim} channels "
            "rotate; it should be an even number of them."
        )
    base = float(params.get("rope_theta") or value_or(config, "rope_theta", theta))
    limit = whole(config, "max_position_embeddings")
    if proportional:
        slower = ProportionalScaling(int(fraction * head_dim // 2), float(params.get("factor") or 1.0))
        return RopeSpec(width, limit, base, slower, 0, interleaved, _axes(params, width // 2, sections), backwards)
    scaling, limit = _scaling(params, config, limit, stretched)
    head = 0 if width == head_dim else head_dim
    return RopeSpec(width, limit, base, scaling, head, interleaved, _axes(params, width // 2, sections), backwards)


def _axes(params: Config, pairs: int, default: Sequence[int]) -> tuple[int, ...]:
    """Return the axis of each pair of channels: sections of consecutive pairs (Qwen2-VL,
    https://arxiv.org/abs/2409.12191), or alternating ones (Qwen3-VL, https://arxiv.org/abs/2511.21631), where the first
    axis has what the others leave.

    Raises:
        ModelFileError: the sections are not of all pairs.
    """
    sections = params.get("mrope_section") or default
    if not sections:
        return ()
    whole_numbers = isinstance(sections, Sequence) and all(type(one) is int and one >= 0 for one in sections)
    if not whole_numbers or (sections is not default and sum(sections) != pairs):
        raise ModelFileError(
            f"The model's config has mrope_section={sections!r}; its sum should be {pairs}, half of the channels."
        )
    if not (default or params.get("mrope_interleaved")):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    turns = len(sections)
    return tuple(i % turns if i // turns < sections[i % turns] else 0 for i in range(pairs))


def local_rope(config: Config, head_dim: int, base: str, limit: int, theta: float = 10000.0) -> RopeSpec:
    """Return the settings of layers with a sliding window, which are scaled only if the configuration has parameters
    per layer type and says so there.

    Args:
        base: their field in older configs.
        limit: positions that the other layers serve.
    """
    params = value_or(config, "rope_parameters", {})
    own = params.get("sliding_attention") or {}
    theta = float(own.get("rope_theta") or params.get(base) or value_or(config, base, theta))
    scaling, _ = _scaling(own, config, whole(config, "max_position_embeddings"), True)
    return RopeSpec(head_dim, limit, theta, scaling)


def proportional_rope(config: Config, head_dim: int, theta: float = 1000000.0, rotated: float = 0.25) -> RopeSpec:
    """Return the settings of Gemma 4's layers without a window: the first channels of each half of a head are rotated,
    by the frequencies of whole heads.

    Args:
        theta, rotated: the family's default base, and fraction of rotated channels.

    Raises:
        ConfigError: another rope type.
    """
    own = dict((value_or(config, "rope_parameters", None) or {}).get("full_attention") or {})
    kind = own.get("rope_type") or "proportional"
    if kind != "proportional":
        raise ConfigError(
            f"The model's config asks for rope type '{kind}' in layers of full attention; Octavo supports "
            "'proportional' there."
        )
    pairs = int(float(value_or(own, "partial_rotary_factor", rotated if not own else 1.0)) * head_dim // 2)
    scaling = ProportionalScaling(pairs, float(value_or(own, "factor", 1.0)))
    limit = whole(config, "max_position_embeddings")
    return RopeSpec(head_dim, limit, float(value_or(own, "rope_theta", theta)), scaling)


def no_rope(head_dim: int, limit: int) -> RopeSpec:
    """Return the settings of layers without rotary positions, for sequences of up to `limit` tokens."""
    return RopeSpec(0, limit, head_dim=head_dim)


Scaling = LinearScaling | Llama3Scaling | LongRopeScaling | YarnScaling | ProportionalScaling | None


def _scaling(params: Config, config: Config, limit: int, stretched: bool) -> tuple[Scaling, int]:
    """Return the scaling, and the most positions that it serves."""
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind == "su" or (params.get("long_factor") and kind == "yarn"):
        kind = "longrope"  # its names in the first configs
    match kind:
        case "default" | "dynamic":
            # Dynamic scaling changes nothing for sequences of up to max_position_embeddings.
            return None, limit
        case "linear":
            factor = float(_needed(params, kind, "factor"))
            return LinearScaling(factor), limit if stretched else stretched_limit(params, config, limit, factor)
        case "llama3":
            return _llama3(params, config, limit), limit
        case "longrope":
            return _longrope(params, config, limit), limit
        case "yarn":
            yarn = _yarn(params, config, limit)
            return yarn, stretched_limit(params, config, limit, yarn.factor)
    raise ConfigError(f"The model's config asks for rope type '{kind}'; Octavo supports {', '.join(ROPE_TYPES)}.")


def _longrope(params: Config, config: Config, limit: int) -> LongRopeScaling:
    original = _original(params, config, limit)
    factor = float(params.get("factor") or limit / original)
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    long, short = (_divisors(params, name) for name in ("long_factor", "short_factor"))
    used = long if limit > original else short
    return LongRopeScaling(used, short, original, float(attention_factor))


def _divisors(params: Config, name: str) -> tuple[float, ...]:
    values: Sequence[Any] = _needed(params, "longrope", name)
    return tuple(float(value) for value in values)


def _needed(params: Config, kind: str, name: str) -> Any:
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


def stretched_limit(params: Config, config: Config, limit: int, factor: float) -> int:
    """Return the most positions after scaling. A config may give the context before or after it; the table must cover
    the longer one."""
    return max(limit, int(_original(params, config, limit) * factor))


def _llama3(params: Config, config: Config, limit: int) -> Llama3Scaling:
    factor, low, high = (float(_needed(params, "llama3", f"{name}factor")) for name in ("", "low_freq_", "high_freq_"))
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
    """Return the YaRN paper's temperature; some configs give it as a ratio of two weighted ones."""
    if mscale and mscale_all_dim:
        return temperature(factor, mscale) / temperature(factor, mscale_all_dim)
    return temperature(factor)


def temperature(factor: float, weight: float = 1.0) -> float:
    """Return 0.1 weight ln(factor) + 1, by which YaRN multiplies queries and keys; 1 without scaling."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
