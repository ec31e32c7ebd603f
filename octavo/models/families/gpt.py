"""The GPT line: GPT-2, GPT-J, GPT-NeoX and OPT."""

from __future__ import annotations

from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import activation, bias_set, decoder_spec, head_size, layer_norm, mlp_spec
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import (
    PARALLEL,
    PARALLEL_TWO,
    PRE,
    DecoderSpec,
    NormSpec,
    StoredModule,
    StoredNames,
    renamed,
)

_QKV = ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj")
_ALL = frozenset({"qkv", "o", "mlp"})
_GPT = {"wte": "embed_tokens", "ln_f": "norm", "h.{}.ln_1": "layers.{}.input_layernorm"}
_GPTJ = StoredNames(
    "transformer",
    renamed(
        _GPT
        | {f"h.{{}}.attn.{part}_proj": f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"}
        | {
            "h.{}.attn.out_proj": "layers.{}.self_attn.o_proj",
            "h.{}.mlp.fc_in": "layers.{}.mlp.up_proj",
            "h.{}.mlp.fc_out": "layers.{}.mlp.down_proj",
        }
    ),
    (".attn.bias", ".attn.masked_bias"),
)
_NEOX = renamed(
    {
        "embed_in": "embed_tokens",
        "embed_out": "lm_head",
        "final_layer_norm": "norm",
        "layers.{}.attention.dense": "layers.{}.self_attn.o_proj",
        "layers.{}.mlp.dense_h_to_4h": "layers.{}.mlp.up_proj",
        "layers.{}.mlp.dense_4h_to_h": "layers.{}.mlp.down_proj",
    }
)
_OPT = StoredNames(
    "model.decoder",
    renamed(
        {
            "final_layer_norm": "norm",
            "layers.{}.self_attn.out_proj": "layers.{}.self_attn.o_proj",
            "layers.{}.self_attn_layer_norm": "layers.{}.input_layernorm",
            "layers.{}.final_layer_norm": "layers.{}.post_attention_layernorm",
            "layers.{}.fc1": "layers.{}.mlp.up_proj",
            "layers.{}.fc2": "layers.{}.mlp.down_proj",
        }
    ),
)


def gpt2(config: Config) -> DecoderSpec:
    """GPT-2: learned positions; matrices are stored transposed."""
    for name, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        only(config, name, value)
    named = _with_llama_names(config)
    hidden, limit = named["hidden_size"], named["max_position_embeddings"]
    modules = (
        *renamed(_GPT | {"wpe": "embed_positions", "h.{}.ln_2": "layers.{}.post_attention_layernorm"}),
        StoredModule("h.{}.attn.c_attn", _QKV, (hidden,) * 3, transposed=True),
        StoredModule("h.{}.attn.c_proj", ("layers.{}.self_attn.o_proj",), transposed=True),
        StoredModule("h.{}.mlp.c_fc", ("layers.{}.mlp.up_proj",), transposed=True),
        StoredModule("h.{}.mlp.c_proj", ("layers.{}.mlp.down_proj",), transposed=True),
    )
    return decoder_spec(
        named,
        norm=layer_norm(config, "layer_norm_epsilon"),
        mlp=mlp_spec(named, activation(config, "activation_function", "gelu_new"), gated=False),
        rope=no_rope(head_size(named), limit),
        learned_positions=limit,
        biases=_ALL,
        tied=True,
        stored=StoredNames("transformer", modules, (".attn.bias", ".attn.masked_bias")),
    )


def gptj(config: Config) -> DecoderSpec:
    """GPT-J: parallel block, partial rotary positions of adjacent channels, a head with a bias."""
    named = _with_llama_names(config)
    dim = head_size(named)
    return decoder_spec(
        named,
        norm=layer_norm(config, "layer_norm_epsilon"),
        norms=PARALLEL,
        mlp=mlp_spec(named, activation(config, "activation_function", "gelu_new"), gated=False),
        rope=rope_spec(named, dim, rotated=whole(config, "rotary_dim", 64) / dim, interleaved=True),
        biases=frozenset({"mlp", "head"}),
        stored=_GPTJ,
    )


def gpt_neox(config: Config) -> DecoderSpec:
    """GPT-NeoX and Pythia: each head's query, key and value are stored together (https://arxiv.org/abs/2204.06745)."""
    dim = head_size(config)
    theta, rotated = float(value_or(config, "rotary_emb_base", 10000)), float(value_or(config, "rotary_pct", 0.25))
    qkv = StoredModule("layers.{}.attention.query_key_value", _QKV, (dim,) * 3)
    ignored = (".attention.bias", ".attention.masked_bias")
    return decoder_spec(
        {**config, "num_key_value_heads": whole(config, "num_attention_heads")},
        norm=layer_norm(config),
        norms=PARALLEL_TWO if value_or(config, "use_parallel_residual", True) else PRE,
        mlp=mlp_spec(config, activation(config, default="gelu"), gated=False),
        rope=rope_spec(config, dim, theta=theta, rotated=rotated),
        biases=bias_set(config, mlp="", default=True) | {"mlp"},
        stored=StoredNames("gpt_neox", (*_NEOX, qkv), ignored),
    )


def opt(config: Config) -> DecoderSpec:
    """OPT and Galactica, but OPT 350M, whose norms come after each sum (https://arxiv.org/abs/2205.01068)."""
    hidden, limit = whole(config, "hidden_size"), whole(config, "max_position_embeddings")
    for name, value in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("word_embed_proj_dim", hidden),
    ):
        only(config, name, value)
    heads, affine = whole(config, "num_attention_heads"), bool(value_or(config, "layer_norm_elementwise_affine", True))
    named = {**config, "intermediate_size": whole(config, "ffn_dim"), "num_key_value_heads": heads}
    return decoder_spec(
        named,
        norm=NormSpec(1e-5, "layer", scaled=affine, bias=affine),
        mlp=mlp_spec(named, activation(config, "activation_function", "relu"), gated=False),
        rope=no_rope(head_size(config), limit),
        learned_positions=limit + 2,
        position_offset=2,
        biases=bias_set(config, qkv="enable_bias", o="enable_bias", mlp="enable_bias", default=True),
        tied=True,
        stored=_OPT,
    )


def _with_llama_names(config: Config) -> Config:
    """Return the configuration with Llama's field names beside GPT-2's."""
    hidden = whole(config, "n_embd")
    return {
        **config,
        "hidden_size": hidden,
        "intermediate_size": whole(config, "n_inner", 4 * hidden),
        "num_hidden_layers": whole(config, "n_layer"),
        "num_attention_heads": whole(config, "n_head"),
        "num_key_value_heads": whole(config, "n_head"),
        "max_position_embeddings": whole(config, "n_positions"),
    }
