"""Gemma 1, 2 and 3, the text models, and VaultGemma: norms scaled by one plus a weight, scaled embeddings, gated
GELU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import (
    activation,
    bias_set,
    decoder_spec,
    layer_types,
    mlp_spec,
    rms_norm,
    sliding_windows,
)
from octavo.models.hf_rope import local_rope, rope_spec
from octavo.models.spec import SANDWICH, DecoderSpec, HeadNorms, LayerNorms, Multipliers

_GELU = "gelu_pytorch_tanh"
_BIDIRECTIONAL = "use_bidirectional_attention"


def gemma(config: Config) -> DecoderSpec:
    """Gemma (https://arxiv.org/abs/2403.08295)."""
    only(config, _BIDIRECTIONAL, False)
    name = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    # The first configs say "gelu" and mean its approximation.
    return _gemma(config, "gelu_tanh" if config.get(name) == "gelu" else activation(config, name, _GELU))


def gemma2(config: Config) -> DecoderSpec:
    """Gemma 2: norms on both sides, soft caps, a window on every other layer (https://arxiv.org/abs/2408.00118)."""
    only(config, _BIDIRECTIONAL, False)
    return _gemma(
        config,
        activation(config, "hidden_activation", _GELU),
        norms=SANDWICH,
        windows=sliding_windows(layer_types(config, 2), whole(config, "sliding_window", 4096)),
        scale=_scale(config),
        attention_cap=_cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
    )


def vaultgemma(config: Config) -> DecoderSpec:
    """VaultGemma (https://arxiv.org/abs/2510.15001): Gemma 2 without norms after its parts."""
    return replace(gemma2(config), norms=LayerNorms(before_mlp="pre_feedforward_layernorm"))


def gemma3(config: Config) -> DecoderSpec:
    """Gemma 3: five layers with a window and their own rotary base to one without (https://arxiv.org/abs/2503.19786)."""
    types = layer_types(config, whole(config, "sliding_window_pattern", 6))
    bidirectional, window = value_or(config, _BIDIRECTIONAL, False), whole(config, "sliding_window", 4096)
    if bidirectional:
        window = window // 2 + 1  # the field counts the tokens on both sides
    head_dim = whole(config, "head_dim", 256)
    everywhere = rope_spec(config, head_dim, theta=1000000.0, layer_type="full_attention", stretched=True)
    local = local_rope(config, head_dim, "rope_local_base_freq", everywhere.max_position)
    return _gemma(
        config,
        activation(config, "hidden_activation", _GELU),
        norms=SANDWICH,
        windows=sliding_windows(types, window),
        bidirectional=bool(bidirectional),
        rope=everywhere,
        ropes=tuple(local if kind == "sliding_attention" else everywhere for kind in types),
        head_norms=HeadNorms(rms_norm(config, offset=1.0)),
        scale=_scale(config),
        attention_cap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
    )


def _gemma(config: Config, act: str, **parts: Any) -> DecoderSpec:
    return decoder_spec(
        config,
        head_dim=256,
        norm=rms_norm(config, offset=1.0),
        mlp=mlp_spec(config, act),
        multipliers=Multipliers(embedding=whole(config, "hidden_size") ** 0.5),
        biases=bias_set(config, mlp=""),
        tied=True,
        **parts,
    )


def _scale(config: Config) -> float:
    return math.pow(float(value_or(config, "query_pre_attn_scalar", 256)), -0.5)


def _cap(config: Config, name: str, default: float) -> float | None:
    """Return a soft cap: the default if the field is missing, none if it is null."""
    value = config.get(name, default)
    return None if value is None else float(value)
