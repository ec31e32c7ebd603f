"""Qwen3: each head's queries and keys are normalized, and heads have 128 channels for every hidden size."""

from __future__ import annotations

from octavo.models.hf_config import Config
from octavo.models.hf_decoder import decoder_spec, layer_windows, rms_norm
from octavo.models.spec import DecoderSpec, HeadNorms


def qwen3(config: Config) -> DecoderSpec:
    """Qwen3, the dense sizes (https://arxiv.org/abs/2505.09388)."""
    biases = frozenset({"qkv", "o"}) if config.get("attention_bias") else frozenset()
    norms = HeadNorms(rms_norm(config))
    return decoder_spec(config, windows=layer_windows(config), head_dim=128, biases=biases, head_norms=norms)
