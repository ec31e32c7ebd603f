"""Families that scale embeddings, residual sums, scores or logits by constants: Granite and MiniCPM."""

from __future__ import annotations

from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import bias_set, decoder_spec
from octavo.models.spec import DecoderSpec, Multipliers


def granite(config: Config) -> DecoderSpec:
    """Granite 3, the dense sizes (https://github.com/ibm-granite/granite-3.0-language-models)."""
    multipliers = Multipliers(
        embedding=float(value_or(config, "embedding_multiplier", 1.0)),
        residual=float(value_or(config, "residual_multiplier", 1.0)),
        logits=1.0 / float(value_or(config, "logits_scaling", 1.0)),
    )
    scale = float(value_or(config, "attention_multiplier", 1.0))
    return decoder_spec(config, multipliers=multipliers, scale=scale, biases=bias_set(config))


def minicpm(config: Config) -> DecoderSpec:
    """MiniCPM 1 and 2 (https://arxiv.org/abs/2404.06395)."""
    hidden, layers = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    multipliers = Multipliers(
        embedding=float(value_or(config, "scale_emb", 1.0)),
        residual=float(value_or(config, "scale_depth", 1.0)) / layers**0.5,
        logits=float(value_or(config, "dim_model_base", 1)) / hidden,
    )
    return decoder_spec(config, multipliers=multipliers, biases=bias_set(config, mlp=""), tied=True)
