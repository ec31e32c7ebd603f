"""Arcee: AFM, and Trinity, a mixture of experts."""

from __future__ import annotations

from octavo.models.families.experts import FUSED, experts_of
from octavo.models.feed_forwards.spec import MlpSpec, SharedSpec
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import (
    FULL,
    activation,
    bias_set,
    decoder_spec,
    head_size,
    layer_types,
    mlp_spec,
    rms_norm,
    sliding_windows,
)
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.mixers.spec import SelfAttention
from octavo.models.spec import DecoderSpec, HeadNorms, LayerNorms, Multipliers, StoredNames, renamed
from octavo.nn.experts_spec import RoutingSpec

_NORMS = LayerNorms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
_TRINITY = StoredNames(
    modules=renamed(
        {
            "layers.{}.mlp.router.gate": "layers.{}.mlp.gate",
            "layers.{}.mlp.expert_bias": "layers.{}.mlp.gate.e_score_correction_bias",
        }
    ),
    stacks=FUSED,
)


def arcee(config: Config) -> DecoderSpec:
    """AFM (https://huggingface.co/arcee-ai/AFM-4.5B): Llama with a squared ReLU in place of a gate."""
    mlp = mlp_spec(config, activation(config, default="relu2"), gated=False)
    return decoder_spec(config, norm=rms_norm(config, default=1e-5), mlp=mlp, biases=bias_set(config))


def afmoe(config: Config) -> DecoderSpec:
    """Trinity (https://huggingface.co/arcee-ai/Trinity-Mini): gated attention, with a window and rotary positions or
    with neither; norms on both sides of each part."""
    only(config, "score_func", "sigmoid")
    for field in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        only(config, field, 1)
    layers, hidden, head_dim = whole(config, "num_hidden_layers"), whole(config, "hidden_size"), head_size(config, 128)
    norm, rope = rms_norm(config, default=1e-5), rope_spec(config, head_dim)
    types = layer_types(config, whole(config, "global_attn_every_n_layers", 4))
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 6),
        scores="sigmoid",
        corrected=True,
        normalized=bool(value_or(config, "route_norm", True)),
        scaling=float(value_or(config, "route_scale", 1.0)),
    )
    shared = whole(config, "moe_intermediate_size", 1408) * int(value_or(config, "num_shared_experts", 2))
    experts = experts_of(
        config, routing, "num_experts", "moe_intermediate_size", 64, SharedSpec(shared) if shared else None
    )
    plain, dense = MlpSpec(whole(config, "intermediate_size"), experts.activation), config.get("num_dense_layers", 1)
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        norms=_NORMS,
        head_norms=HeadNorms(norm),
        windows=sliding_windows(types, whole(config, "sliding_window", 1024)),
        rope=rope,
        ropes=tuple(no_rope(head_dim, rope.max_position) if kind == FULL else rope for kind in types),
        mixers=(SelfAttention(gated=True),) * layers,
        mlps=[plain if i < int(dense or 0) else experts for i in range(layers)],
        multipliers=Multipliers(embedding=hidden**0.5 if config.get("mup_enabled") else 1.0),
        biases=bias_set(config, mlp=""),
        stored=_TRINITY,
    )
