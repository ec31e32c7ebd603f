"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window on some layers if switched on."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.hf_config import Config
from octavo.models.hf_decoder import decoder_spec, layer_windows
from octavo.models.spec import DecoderSpec, StoredNames


def qwen2(config: Config) -> DecoderSpec:
    """Qwen2 (https://arxiv.org/abs/2407.10671)."""
    return decoder_spec(config, windows=layer_windows(config), biases=frozenset({"qkv"}))


def mimo(config: Config) -> DecoderSpec:
    """MiMo (https://arxiv.org/abs/2505.07608): Qwen2 with layers for multi-token prediction."""
    return replace(qwen2(config), stored=StoredNames(foreign=("model.mtp_layers.",)))
