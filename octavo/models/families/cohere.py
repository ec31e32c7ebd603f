"""Cohere's Command models: parallel block, LayerNorm without a bias, scaled logits."""

from __future__ import annotations

from typing import Any

from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import bias_set, decoder_spec, head_size, layer_norm, layer_types, sliding_windows
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import PARALLEL, DecoderSpec, HeadNorms, Multipliers


def cohere(config: Config) -> DecoderSpec:
    """Command R and R+."""
    rope = rope_spec(config, head_size(config), theta=500000.0, interleaved=True)
    norms = HeadNorms(layer_norm(config, bias=False), "heads") if config.get("use_qk_norm") else None
    return _cohere(config, rope=rope, head_norms=norms)


def cohere2(config: Config) -> DecoderSpec:
    """Command R7B and A: layers with a window and rotary positions, every fourth with neither."""
    types = layer_types(config, whole(config, "sliding_window_pattern", 4))
    rope = rope_spec(config, head_size(config), interleaved=True)
    plain = no_rope(head_size(config), rope.max_position)
    return _cohere(
        config,
        rope=rope,
        ropes=tuple(rope if kind == "sliding_attention" else plain for kind in types),
        windows=sliding_windows(types, whole(config, "sliding_window", 4096)),
    )


def _cohere(config: Config, **parts: Any) -> DecoderSpec:
    return decoder_spec(
        config,
        norm=layer_norm(config, bias=False),
        norms=PARALLEL,
        multipliers=Multipliers(logits=float(value_or(config, "logit_scale", 0.0625))),
        biases=bias_set(config, mlp=""),
        tied=True,
        **parts,
    )
