"""GLM-4: partial rotary positions of adjacent channels, gate and operand in one matrix."""

from __future__ import annotations

from octavo.models.hf_config import Config, whole
from octavo.models.hf_decoder import bias_set, decoder_spec, head_size, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import PRE, DecoderSpec, LayerNorms, StoredModule, StoredNames


def glm(config: Config, norms: LayerNorms = PRE) -> DecoderSpec:
    """GLM-4 9B (https://arxiv.org/abs/2406.12793)."""
    inner, head_dim = whole(config, "intermediate_size"), head_size(config, 128)
    gate_up = ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj")
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=rms_norm(config, default=1.5625e-7),
        norms=norms,
        rope=rope_spec(config, head_dim, rotated=0.5, interleaved=True),
        biases=bias_set(config, o="", mlp="", default=True),
        stored=StoredNames(modules=(StoredModule("layers.{}.mlp.gate_up_proj", gate_up, (inner, inner)),)),
    )


def glm4(config: Config) -> DecoderSpec:
    """GLM-4-0414: norms on both sides of each part."""
    norms = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return glm(config, norms)
