"""Falcon and BLOOM: queries, keys and values in one matrix, and linear attention biases (ALiBi)."""

from __future__ import annotations

from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import activation, decoder_spec, head_size, layer_norm, mlp_spec
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import PARALLEL, PARALLEL_TWO, PRE, DecoderSpec, StoredModule, StoredNames, renamed

_QKV = ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj")
_NAMES = renamed(
    {
        "word_embeddings": "embed_tokens",
        "word_embeddings_layernorm": "embed_norm",
        "ln_f": "norm",
        "h.{}.input_layernorm": "layers.{}.input_layernorm",
        "h.{}.ln_attn": "layers.{}.input_layernorm",
        "h.{}.ln_mlp": "layers.{}.post_attention_layernorm",
        "h.{}.post_attention_layernorm": "layers.{}.post_attention_layernorm",
        "h.{}.self_attention.dense": "layers.{}.self_attn.o_proj",
        "h.{}.mlp.dense_h_to_4h": "layers.{}.mlp.up_proj",
        "h.{}.mlp.dense_4h_to_h": "layers.{}.mlp.down_proj",
    }
)
_FUSED = "h.{}.self_attention.query_key_value"


def falcon(config: Config) -> DecoderSpec:
    """Falcon, with the old and the new decoder (https://arxiv.org/abs/2311.16867)."""
    heads = whole(config, "num_attention_heads", config.get("n_head"))
    new, several = bool(config.get("new_decoder_architecture")), not value_or(config, "multi_query", True)
    kv_heads = whole(config, "num_kv_heads", config.get("n_head_kv") or heads) if new else heads if several else 1
    hidden = whole(config, "hidden_size")
    named = {
        **config,
        "num_hidden_layers": whole(config, "num_hidden_layers", config.get("n_layer")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": whole(config, "ffn_hidden_size", 4 * hidden),
        "max_position_embeddings": whole(config, "max_position_embeddings", 2048),
    }
    norms = PRE
    if new or value_or(config, "parallel_attn", True):
        norms = PARALLEL_TWO if new and value_or(config, "num_ln_in_parallel_attn", 2) == 2 else PARALLEL
    dim, alibi = head_size(named), bool(config.get("alibi"))
    return decoder_spec(
        named,
        norm=layer_norm(config, "layer_norm_epsilon"),
        norms=norms,
        mlp=mlp_spec(named, activation(config, "activation", "gelu"), gated=False),
        rope=no_rope(dim, named["max_position_embeddings"]) if alibi else rope_spec(named, dim),
        alibi=dim**-0.5 if alibi else 0.0,
        biases=frozenset({"qkv", "o", "mlp"}) if config.get("bias") else frozenset(),
        tied=True,
        stored=StoredNames("transformer", (*_NAMES, StoredModule(_FUSED, _QKV, (heads // kv_heads * dim, dim, dim)))),
    )


def bloom(config: Config) -> DecoderSpec:
    """BLOOM (https://arxiv.org/abs/2211.05100)."""
    only(config, "apply_residual_connection_post_layernorm", False)
    hidden = whole(config, "hidden_size", config.get("n_embed"))
    heads = whole(config, "n_head", config.get("num_attention_heads"))
    named = {
        **config,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": whole(config, "n_layer", config.get("num_hidden_layers")),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": whole(config, "seq_length", 2048),
    }
    norm, dim = layer_norm(config, "layer_norm_epsilon"), head_size(named)
    return decoder_spec(
        named,
        norm=norm,
        embedding_norm=norm,
        mlp=mlp_spec(named, "gelu_tanh", gated=False),
        rope=no_rope(dim, named["max_position_embeddings"]),
        alibi=1.0,
        biases=frozenset({"qkv", "o", "mlp"}),
        tied=True,
        stored=StoredNames("transformer", (*_NAMES, StoredModule(_FUSED, _QKV, (dim,) * 3))),
    )
