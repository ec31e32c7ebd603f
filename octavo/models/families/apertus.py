"""Apertus."""

from __future__ import annotations

from octavo.core.errors import ModelFileError
from octavo.models.feed_forwards.spec import MlpSpec
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import bias_set, decoder_spec, head_size, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import DecoderSpec, HeadNorms, LayerNorms

_THETA = 12000000.0
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def apertus(config: Config) -> DecoderSpec:
    """Apertus (https://arxiv.org/abs/2509.14233): an activation with trained parameters in place of a gate; norms of
    queries and keys."""
    only(config, "hidden_act", "xielu")
    only(config, "mlp_bias", False)
    only(config, "post_norm", False)
    layers, inner = whole(config, "num_hidden_layers"), whole(config, "intermediate_size")
    curves = value_or(config, "xielu_parameters", [()] * layers)  # of GGUF files
    if len(curves) != layers:
        raise ModelFileError(f"The model's metadata has {len(curves)} parameters of xIELU for {layers} layers.")
    scaled = config.get("rope_parameters") or config.get("rope_scaling")
    norm = rms_norm(config, default=1e-5)
    return decoder_spec(
        config,
        norm=norm,
        norms=LayerNorms("attention_layernorm", before_mlp="feedforward_layernorm"),
        rope=rope_spec(config if scaled else {**config, "rope_parameters": _ROPE}, head_size(config), theta=_THETA),
        head_norms=HeadNorms(norm) if value_or(config, "qk_norm", True) else None,
        mlps=[MlpSpec(inner, "xielu", False, tuple(curve)) for curve in curves],
        biases=bias_set(config, mlp=""),
    )
