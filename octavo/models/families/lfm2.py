"""LFM2: short convolutions with some layers of attention."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.families.experts import experts_of, separate, stacks
from octavo.models.families.mamba import layer_mixers
from octavo.models.feed_forwards.spec import FeedForwardSpec, MlpSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import decoder_spec, head_size
from octavo.models.hf_rope import rope_spec
from octavo.models.mixers.spec import ShortConvSpec
from octavo.models.spec import DecoderSpec, HeadNorms, NormSpec, StoredNames, renamed
from octavo.nn.experts_spec import RoutingSpec

_NAMES = {
    "layers.{}.operator_norm": "layers.{}.input_layernorm",
    "layers.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "layers.{}.self_attn.out_proj": "layers.{}.self_attn.o_proj",
    "layers.{}.self_attn.q_layernorm": "layers.{}.self_attn.q_norm",
    "layers.{}.self_attn.k_layernorm": "layers.{}.self_attn.k_norm",
    "layers.{}.feed_forward.w1": "layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "layers.{}.mlp.up_proj",
    "layers.{}.feed_forward.gate": "layers.{}.mlp.gate",
    "layers.{}.feed_forward.expert_bias": "layers.{}.mlp.gate.e_score_correction_bias",
    **separate("layers.{}.feed_forward.experts", "w1", "w3", "w2"),
    "embedding_norm": "norm",
}


def lfm2(config: Config) -> DecoderSpec:
    """LFM2 (https://www.liquid.ai/blog/liquid-foundation-models-v2)."""
    return _lfm2(config, [MlpSpec(_inner_size(config))] * whole(config, "num_hidden_layers"))


def lfm2_moe(config: Config) -> DecoderSpec:
    """LFM2 with experts (https://huggingface.co/LiquidAI/LFM2-8B-A1B)."""
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 4),
        scores="sigmoid",
        corrected=bool(value_or(config, "use_expert_bias", True)),
        normalized=bool(value_or(config, "norm_topk_prob", True)),
        floor=1e-6,
        scaling=float(value_or(config, "routed_scaling_factor", 1.0)),
    )
    experts = experts_of(config, routing, "num_experts", "moe_intermediate_size", 32)
    dense = MlpSpec(whole(config, "intermediate_size", 7168))
    first = int(value_or(config, "num_dense_layers", 2))
    return _lfm2(config, [dense if i < first else experts for i in range(whole(config, "num_hidden_layers"))])


def _lfm2(config: Config, mlps: Sequence[FeedForwardSpec]) -> DecoderSpec:
    layers, norm = whole(config, "num_hidden_layers"), NormSpec(float(value_or(config, "norm_eps", 1e-5)))
    attends = value_or(config, "full_attn_idxs", range(layers))
    kinds = value_or(config, "layer_types", ["full_attention" if i in attends else "conv" for i in range(layers)])
    conv = ShortConvSpec(
        whole(config, "hidden_size"), whole(config, "conv_L_cache", 3), bool(value_or(config, "conv_bias", False))
    )
    return decoder_spec(
        config,
        norm=norm,
        head_norms=HeadNorms(norm),
        rope=rope_spec(config, head_size(config), theta=1000000.0),
        mlps=mlps,
        mixers=layer_mixers(kinds, conv),
        tied=bool(value_or(config, "tie_embedding", True)),
        stored=StoredNames(modules=renamed(_NAMES), stacks=stacks("layers.{}.feed_forward.experts")),
    )


def _inner_size(config: Config) -> int:
    """Return the feed-forward's size: two thirds of the stated one, rounded up, if the configuration says so."""
    size = whole(config, "block_ff_dim", whole(config, "intermediate_size", 12288))
    if not value_or(config, "block_auto_adjust_ff_dim", True):
        return size
    multiple = whole(config, "block_multiple_of", 256)
    size = int(float(value_or(config, "block_ffn_dim_multiplier", 1.0)) * int(2 * size / 3))
    return -(-size // multiple) * multiple
