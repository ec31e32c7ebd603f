"""LFM2: short convolutions with some layers of attention."""

from __future__ import annotations

from octavo.models.families.mamba import layer_mixers
from octavo.models.feed_forwards.spec import MlpSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import decoder_spec, head_size
from octavo.models.hf_rope import rope_spec
from octavo.models.mixers.spec import ShortConvSpec
from octavo.models.spec import DecoderSpec, HeadNorms, NormSpec, StoredNames, renamed

_NAMES = {
    "layers.{}.operator_norm": "layers.{}.input_layernorm",
    "layers.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "layers.{}.self_attn.out_proj": "layers.{}.self_attn.o_proj",
    "layers.{}.self_attn.q_layernorm": "layers.{}.self_attn.q_norm",
    "layers.{}.self_attn.k_layernorm": "layers.{}.self_attn.k_norm",
    "layers.{}.feed_forward.w1": "layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "layers.{}.mlp.up_proj",
    "embedding_norm": "norm",
}


def lfm2(config: Config) -> DecoderSpec:
    """LFM2 (https://www.liquid.ai/blog/liquid-foundation-models-v2)."""
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
        mlp=MlpSpec(_inner_size(config)),
        mixers=layer_mixers(kinds, conv),
        tied=bool(value_or(config, "tie_embedding", True)),
        stored=StoredNames(modules=renamed(_NAMES)),
    )


def _inner_size(config: Config) -> int:
    """Return the feed-forward's size: two thirds of the stated one, rounded up, if the configuration says so."""
    size = whole(config, "block_ff_dim", whole(config, "intermediate_size", 12288))
    if not value_or(config, "block_auto_adjust_ff_dim", True):
        return size
    multiple = whole(config, "block_multiple_of", 256)
    size = int(float(value_or(config, "block_ffn_dim_multiplier", 1.0)) * int(2 * size / 3))
    return -(-size // multiple) * multiple
