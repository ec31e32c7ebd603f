"""Cohere's Command models: parallel block, LayerNorm without a bias, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.core.errors import ConfigError
from octavo.models.families.experts import experts_of
from octavo.models.families.moe import PER_EXPERT, by_type
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec, SharedSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import (
    FULL,
    SLIDING,
    bias_set,
    decoder_spec,
    head_size,
    layer_norm,
    layer_types,
    rms_norm,
    sliding_windows,
)
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import PARALLEL, DecoderSpec, HeadNorms, Multipliers
from octavo.nn.experts_spec import RoutingSpec


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


def cohere2_moe(config: Config) -> DecoderSpec:
    """Command A+ (https://huggingface.co/CohereLabs/command-a-plus-05-2026): Command A with experts, after some dense
    layers, which may have rotary positions without a window."""
    layers, dense = whole(config, "num_hidden_layers"), int(value_or(config, "first_k_dense_replace", 0))
    first = whole(config, "prefix_dense_sliding_window_pattern", 1)
    period = whole(config, "sliding_window_pattern", 4)
    steps = [(i + 1) % first if i < dense else (i - dense + 1) % period for i in range(layers)]
    types = layer_types(config, 0, [SLIDING if step else FULL for step in steps])
    mlps = by_type(
        {**config, "intermediate_size": config.get("prefix_dense_intermediate_size")},
        _experts(config),
        [i >= dense for i in range(layers)],
    )
    rotates = [
        kind == SLIDING or (isinstance(mlp, MlpSpec) and first == 1) for kind, mlp in zip(types, mlps, strict=True)
    ]
    head_dim = head_size(config, 128)
    rope = rope_spec(config, head_dim, interleaved=True)
    norm = layer_norm(config, bias=False) if config.get("rms_norm_eps") is None else rms_norm(config)
    spec = _cohere(
        {**config, "head_dim": head_dim},
        rope=rope,
        ropes=tuple(rope if has else no_rope(head_dim, rope.max_position) for has in rotates),
        windows=sliding_windows(types, whole(config, "sliding_window", 4096)),
        mlps=mlps,
        stored=PER_EXPERT,
    )
    return replace(spec, norm=norm)


def _experts(config: Config) -> ExpertsSpec:
    """Return Command's experts; a token's weights are of its own experts only."""
    function = value_or(config, "expert_selection_fn", "softmax")
    if function not in ("softmax", "sigmoid"):
        raise ConfigError(
            f"The model's config has expert_selection_fn={function!r}; Octavo supports softmax and sigmoid."
        )
    combined = value_or(config, "shared_expert_combination_strategy", "average")
    if combined not in ("sum", "average"):
        raise ConfigError(
            f"The model's config has shared_expert_combination_strategy={combined!r}; Octavo supports sum and average."
        )
    size, count = whole(config, "intermediate_size"), int(value_or(config, "num_shared_experts", 0))
    share = 0.5 if count and combined == "average" else 1.0
    sigmoid = function == "sigmoid"
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 2),
        scores="sigmoid" if sigmoid else "chosen",
        normalized=sigmoid and bool(value_or(config, "norm_topk_prob", True)),
        scaling=share,
    )
    shared = SharedSpec(size * count, scale=share) if count else None
    return experts_of(config, routing, "num_experts", "intermediate_size", 8, shared)


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
