"""Llama, and families with the same architecture but other defaults."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import (
    activation,
    bias_set,
    decoder_spec,
    head_size,
    layer_norm,
    layer_types,
    mlp_spec,
    rms_norm,
    sliding_windows,
)
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import DecoderSpec, StoredModule, StoredNames


def llama(config: Config) -> DecoderSpec:
    """Llama 1 to 3.3 and SmolLM 1 and 2 (https://arxiv.org/abs/2407.21783)."""
    return decoder_spec(config, biases=bias_set(config))


def smollm3(config: Config) -> DecoderSpec:
    """SmolLM3: every fourth layer has no rotary positions (https://huggingface.co/blog/smollm3)."""
    layers, head_dim = whole(config, "num_hidden_layers"), head_size(config)
    rope = rope_spec(config, head_dim, theta=2000000.0)
    interval = whole(config, "no_rope_layer_interval", 4)
    rotates = value_or(config, "no_rope_layers", [(i + 1) % interval for i in range(layers)])
    window = whole(config, "sliding_window") if config.get("use_sliding_window") else None
    return decoder_spec(
        config,
        rope=rope,
        ropes=tuple(rope if has else no_rope(head_dim, rope.max_position) for has in rotates),
        windows=sliding_windows(layer_types(config, 0), window),
        biases=bias_set(config),
        tied=True,
    )


def seed_oss(config: Config) -> DecoderSpec:
    """Seed-OSS: biases on q, k and v."""
    biases = bias_set(config, qkv="", o="attention_out_bias") | bias_set(config, o="", mlp="", default=True)
    return decoder_spec(config, head_dim=128, biases=biases)


def ernie(config: Config) -> DecoderSpec:
    """ERNIE 4.5, the dense sizes: adjacent channels are rotated together."""
    head_dim = whole(config, "head_dim", 128)
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=rms_norm(config, default=1e-5),
        rope=rope_spec(config, head_dim, theta=500000.0, interleaved=True),
        biases=bias_set(config, qkv="use_bias", o="use_bias", mlp="use_bias"),
        tied=True,
    )


def helium(config: Config) -> DecoderSpec:
    """Helium (https://kyutai.org/2025/01/13/helium.html): adjacent channels are rotated together."""
    head_dim = head_size(config, 128)
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=rms_norm(config, default=1e-8),
        rope=rope_spec(config, head_dim, theta=100000.0, interleaved=True),
        biases=bias_set(config, o=""),
    )


def jais2(config: Config) -> DecoderSpec:
    """Jais 2 (https://huggingface.co/inceptionai/Jais-2-8B-Chat): LayerNorm, squared ReLU, biases."""
    return decoder_spec(
        config,
        norm=layer_norm(config),
        mlp=mlp_spec(config, activation(config, default="relu2"), gated=False),
        biases=bias_set(config, default=True),
    )


def iquest_coder(config: Config) -> DecoderSpec:
    """IQuest-Coder (https://huggingface.co/IQuestLab/IQuest-Coder-V1-40B-Instruct): heads of any size."""
    only(config, "clip_qkv", None)
    only(config, "use_sliding_window", False)
    return decoder_spec(config, head_dim=128, norm=rms_norm(config, default=1e-5), biases=bias_set(config))


def internlm3(config: Config) -> DecoderSpec:
    """InternLM3: heads of any size."""
    return decoder_spec(config, norm=rms_norm(config), biases=bias_set(config, qkv="qkv_bias", o="bias", mlp="bias"))


def internlm2(config: Config) -> DecoderSpec:
    """InternLM2: the heads that share keys are stored together, with their keys and values."""
    spec = decoder_spec(config, biases=bias_set(config, qkv="bias", o="bias", mlp=""))
    group, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    modules = (
        StoredModule("tok_embeddings", ("embed_tokens",)),
        StoredModule("output", ("lm_head",)),
        StoredModule(
            "layers.{}.attention.wqkv",
            ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.k_proj", "layers.{}.self_attn.v_proj"),
            (group * dim, dim, dim),
        ),
        StoredModule("layers.{}.attention.wo", ("layers.{}.self_attn.o_proj",)),
        StoredModule("layers.{}.attention_norm", ("layers.{}.input_layernorm",)),
        StoredModule("layers.{}.ffn_norm", ("layers.{}.post_attention_layernorm",)),
        StoredModule("layers.{}.feed_forward.w1", ("layers.{}.mlp.gate_proj",)),
        StoredModule("layers.{}.feed_forward.w3", ("layers.{}.mlp.up_proj",)),
        StoredModule("layers.{}.feed_forward.w2", ("layers.{}.mlp.down_proj",)),
    )
    return replace(spec, stored=StoredNames(modules=modules))
