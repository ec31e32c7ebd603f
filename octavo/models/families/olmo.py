"""OLMo 1, 2 and 3."""

from __future__ import annotations

from octavo.models.hf_config import Config, whole
from octavo.models.hf_decoder import bias_set, decoder_spec, head_size, layer_types, rms_norm, sliding_windows
from octavo.models.hf_rope import local_rope, rope_spec
from octavo.models.spec import POST, DecoderSpec, HeadNorms, NormSpec


def olmo(config: Config) -> DecoderSpec:
    """OLMo: LayerNorm without weights, and a limit on queries, keys and values (https://arxiv.org/abs/2402.00838)."""
    norm = NormSpec(1e-5, "layer", scaled=False)
    return decoder_spec(config, norm=norm, qkv_clip=config.get("clip_qkv"), biases=bias_set(config, mlp=""))


def olmo2(config: Config) -> DecoderSpec:
    """OLMo 2: norms after each part, and over all queries and keys (https://arxiv.org/abs/2501.00656)."""
    norm = rms_norm(config, default=1e-5)
    head_norms = HeadNorms(norm, "all")
    return decoder_spec(config, norm=norm, norms=POST, head_norms=head_norms, biases=bias_set(config, mlp=""))


def olmo3(config: Config) -> DecoderSpec:
    """OLMo 3: OLMo 2 with a window on three of four layers, which are not scaled to long contexts."""
    types, dim = layer_types(config, 4), head_size(config)
    everywhere = rope_spec(config, dim, theta=500000.0, layer_type="full_attention")
    local = local_rope(config, dim, "rope_theta", everywhere.max_position, 500000.0)
    norm = rms_norm(config, default=1e-5)
    return decoder_spec(
        config,
        norm=norm,
        norms=POST,
        head_norms=HeadNorms(norm, "all"),
        windows=sliding_windows(types, whole(config, "sliding_window", 4096)),
        rope=everywhere,
        ropes=tuple(local if kind == "sliding_attention" else everywhere for kind in types),
        biases=bias_set(config, mlp=""),
    )
