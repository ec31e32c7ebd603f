"""Phi 1 to 4."""

from __future__ import annotations

from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import activation, decoder_spec, head_size, layer_norm, mlp_spec, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import PARALLEL, DecoderSpec, HeadNorms, StoredModule, StoredNames, renamed

_ATTENTION = ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj")
_PHI = renamed(
    {
        "layers.{}.self_attn.dense": "layers.{}.self_attn.o_proj",
        "layers.{}.self_attn.q_layernorm": "layers.{}.self_attn.q_norm",
        "layers.{}.self_attn.k_layernorm": "layers.{}.self_attn.k_norm",
        "layers.{}.mlp.fc1": "layers.{}.mlp.up_proj",
        "layers.{}.mlp.fc2": "layers.{}.mlp.down_proj",
        "final_layernorm": "norm",
    }
)


def phi(config: Config) -> DecoderSpec:
    """Phi-1, 1.5 and 2: parallel block, partial rotary positions, biases (https://arxiv.org/abs/2309.05463)."""
    norm = layer_norm(config)
    return decoder_spec(
        config,
        norm=norm,
        norms=PARALLEL,
        head_norms=HeadNorms(norm) if config.get("qk_layernorm") else None,
        rope=rope_spec(config, head_size(config), rotated=0.5),
        mlp=mlp_spec(config, activation(config, default="gelu_new"), gated=False),
        biases=frozenset({"qkv", "o", "mlp", "head"}),
        stored=StoredNames(modules=_PHI),
    )


def phi3(config: Config) -> DecoderSpec:
    """Phi-3 and Phi-4: Llama with fused projections, and LongRoPE (https://arxiv.org/abs/2404.14219)."""
    heads, inner = whole(config, "num_attention_heads"), whole(config, "intermediate_size")
    dim, kv_heads = head_size(config), whole(config, "num_key_value_heads", heads)
    gate_up = ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj")
    modules = (
        StoredModule("layers.{}.self_attn.qkv_proj", _ATTENTION, (heads * dim, kv_heads * dim, kv_heads * dim)),
        StoredModule("layers.{}.mlp.gate_up_proj", gate_up, (inner, inner)),
    )
    return decoder_spec(
        config,
        norm=rms_norm(config, default=1e-5),
        windows=[value_or(config, "sliding_window", None)] * whole(config, "num_hidden_layers"),
        stored=StoredNames(modules=modules),
    )
