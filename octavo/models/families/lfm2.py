"""LFM2 and LFM3: short convolutions with some layers of attention."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.families.experts import experts_of, separate, stacks
from octavo.models.families.mamba import layer_mixers
from octavo.models.feed_forwards.spec import FeedForwardSpec, MlpSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import FULL, SLIDING, bias_set, decoder_spec, head_size, sliding_windows
from octavo.models.hf_rope import rope_spec
from octavo.models.mixers.spec import SelfAttention, ShortConvSpec
from octavo.models.spec import PRE, DecoderSpec, HeadNorms, LayerNorms, NormSpec, StoredNames, renamed
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


_LFM3_TYPES = {0: SLIDING, 2: FULL}
_LFM3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
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


def lfm3(config: Config) -> DecoderSpec:
    """LFM3 (https://huggingface.co/LiquidAI/LFM3-1.7B): short convolutions, and attention with and without a window,
    whose heads have gates; norms on both sides of each part."""
    layers, head_dim = whole(config, "num_hidden_layers"), head_size(config, 128)
    norm = NormSpec(float(value_or(config, "norm_eps", 1e-5)))
    kinds = value_or(config, "layer_types", ["conv" if i % 2 or not i else _LFM3_TYPES[i % 4] for i in range(layers)])
    given = {"rope_parameters": value_or(config, "rope_parameters", _LFM3_ROPES)}
    ropes = {kind: rope_spec({**config, **given}, head_dim, layer_type=kind) for kind in (SLIDING, FULL)}
    conv = ShortConvSpec(
        whole(config, "hidden_size"), whole(config, "conv_L_cache", 7), bool(value_or(config, "conv_bias", False))
    )
    gated = bool(value_or(config, "use_attention_gate", True))
    attention = SelfAttention(gated=gated, gates_heads=True) if gated else SelfAttention()
    norms = LayerNorms(after_mixer="post_operator_norm", after_mlp="post_ffn_norm")
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        norms=norms if value_or(config, "use_sandwich_norm", True) else PRE,
        head_norms=HeadNorms(norm),
        rope=ropes[FULL],
        ropes=tuple(ropes.get(kind, ropes[FULL]) for kind in kinds),
        windows=sliding_windows(kinds, whole(config, "sliding_window", 256)),
        mixers=layer_mixers([FULL if kind == SLIDING else kind for kind in kinds], conv, attention),
        biases=bias_set(config, mlp=""),
        tied=True,
        stored=StoredNames(modules=renamed(_NAMES | {"layers.{}.self_attn.g_proj": "layers.{}.self_attn.gate_proj"})),
    )


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
