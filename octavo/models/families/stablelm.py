"""Families with LayerNorm in Llama's block: StableLM, StarCoder2 and Nemotron."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import activation, bias_set, decoder_spec, head_size, layer_norm, mlp_spec
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import PARALLEL, PRE, DecoderSpec, StoredModule, StoredNames


def stablelm(config: Config) -> DecoderSpec:
    """StableLM 2 1.6B and StableLM 3B (https://arxiv.org/abs/2402.17834)."""
    only(config, "qk_layernorm", False)
    return decoder_spec(
        config,
        norm=layer_norm(config),
        norms=PARALLEL if config.get("use_parallel_residual") else PRE,
        rope=rope_spec(config, head_size(config), rotated=0.25),
        biases=bias_set(config, qkv="use_qkv_bias", o="", mlp=""),
    )


def starcoder2(config: Config) -> DecoderSpec:
    """StarCoder2 (https://arxiv.org/abs/2402.19173)."""
    modules = (
        StoredModule("layers.{}.mlp.c_fc", ("layers.{}.mlp.up_proj",)),
        StoredModule("layers.{}.mlp.c_proj", ("layers.{}.mlp.down_proj",)),
    )
    return decoder_spec(
        config,
        norm=layer_norm(config, "norm_epsilon"),
        mlp=mlp_spec(config, activation(config, default="gelu_pytorch_tanh"), gated=False),
        windows=[value_or(config, "sliding_window", None)] * whole(config, "num_hidden_layers"),
        biases=bias_set(config, qkv="use_bias", o="use_bias", mlp="use_bias", default=True),
        tied=True,
        stored=StoredNames(modules=modules),
    )


def nemotron(config: Config) -> DecoderSpec:
    """Nemotron 4 and Minitron: norms scaled by one plus a weight, squared ReLU (https://arxiv.org/abs/2402.16819)."""
    return decoder_spec(
        config,
        norm=replace(layer_norm(config, "norm_eps"), offset=1.0),
        mlp=mlp_spec(config, activation(config, default="relu2"), gated=False),
        rope=rope_spec(config, head_size(config), rotated=0.5),
        biases=bias_set(config),
    )
