"""The first Qwen."""

from __future__ import annotations

from octavo.models.feed_forwards.spec import MlpSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import decoder_spec
from octavo.models.spec import DecoderSpec, NormSpec, StoredModule, StoredNames, renamed

_NAMES = renamed(
    {
        "wte": "embed_tokens",
        "ln_f": "norm",
        "h.{}.ln_1": "layers.{}.input_layernorm",
        "h.{}.ln_2": "layers.{}.post_attention_layernorm",
        "h.{}.attn.c_proj": "layers.{}.self_attn.o_proj",
        "h.{}.mlp.w1": "layers.{}.mlp.up_proj",
        "h.{}.mlp.w2": "layers.{}.mlp.gate_proj",
        "h.{}.mlp.c_proj": "layers.{}.mlp.down_proj",
    }
)
_QKV = ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj")


def qwen1(config: Config) -> DecoderSpec:
    """Qwen 1 (https://arxiv.org/abs/2309.16609).

    Contexts are as long as in training (`seq_length`), up to which neither scores nor frequencies are scaled.
    """
    named = {
        **config,
        "max_position_embeddings": whole(config, "seq_length", 8192),
        "rope_theta": value_or(config, "rotary_emb_base", 10000.0),
        "partial_rotary_factor": value_or(config, "rotary_pct", 1.0),
    }
    head_dim = whole(config, "kv_channels", 128)
    width = whole(config, "num_attention_heads") * head_dim
    others = frozenset[str]() if config.get("no_bias", True) else frozenset({"o", "mlp"})
    return decoder_spec(
        named,
        head_dim=head_dim,
        norm=NormSpec(float(value_or(config, "layer_norm_epsilon", 1e-6))),
        mlp=MlpSpec(whole(config, "intermediate_size") // 2, "silu", gated=True),
        biases=frozenset({"qkv"}) | others,
        stored=StoredNames("transformer", (*_NAMES, StoredModule("h.{}.attn.c_attn", _QKV, (width, width, width)))),
    )
