"""Llama, and families with the same architecture, such as SmolLM."""

from __future__ import annotations

from octavo.models.hf_config import Config, decoder_spec, whole
from octavo.models.spec import DecoderSpec


def llama(config: Config) -> DecoderSpec:
    """Llama 1 to 3.3 and SmolLM 1 and 2 (https://arxiv.org/abs/2407.21783)."""
    biases = set()
    if config.get("attention_bias"):
        biases |= {"qkv", "o"}
    if config.get("mlp_bias"):
        biases |= {"mlp"}
    windows = [None] * whole(config, "num_hidden_layers")
    return decoder_spec(config, windows=windows, biases=frozenset(biases))
