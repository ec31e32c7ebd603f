"""Mistral: Llama with a sliding window on every layer, in the versions that have one; Ministral 3."""

from __future__ import annotations

from octavo.models.hf_config import Config, only, require, whole
from octavo.models.hf_decoder import FULL, SLIDING, decoder_spec, layer_types, rms_norm, sliding_windows
from octavo.models.mixers.spec import SelfAttention, Temperature
from octavo.models.spec import DecoderSpec


def mistral(config: Config) -> DecoderSpec:
    """Mistral 7B and its successors of the same architecture (https://arxiv.org/abs/2310.06825).

    An absent `sliding_window` means 4096, as in the first version; null means none.
    """
    only(config, "layer_types", None)
    window = None if config.get("sliding_window", 4096) is None else whole(config, "sliding_window", 4096)
    return decoder_spec(config, windows=[window] * whole(config, "num_hidden_layers"))


def ministral(config: Config) -> DecoderSpec:
    """Ministral 8B (https://huggingface.co/mistralai/Ministral-8B-Instruct-2410): a window on some layers."""
    window = None if config.get("sliding_window", 4096) is None else whole(config, "sliding_window", 4096)
    default = [FULL if window is None else SLIDING] * whole(config, "num_hidden_layers")
    types = default if config.get("layer_types") is None else layer_types(config, 0)
    return decoder_spec(config, windows=sliding_windows(types, window))


def sharpening(rope: Config) -> Temperature | None:
    """Return the factors of queries that rope parameters state."""
    scale = rope.get("llama_4_scaling_beta")
    return Temperature(whole(rope, "original_max_position_embeddings"), float(scale), first=0) if scale else None


def ministral3(config: Config) -> DecoderSpec:
    """Ministral 3: queries are scaled up with their position (https://arxiv.org/abs/2601.08584)."""
    only(config, "layer_types", None)
    layers, rope = whole(config, "num_hidden_layers"), require(config, "rope_parameters")
    window = None if config.get("sliding_window") is None else whole(config, "sliding_window")
    mixers = (SelfAttention(temperature=sharpening(rope)),) * layers
    return decoder_spec(config, norm=rms_norm(config, default=1e-5), windows=[window] * layers, mixers=mixers)
