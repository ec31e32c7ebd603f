"""EXAONE 3 and 4, and K-EXAONE."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families.experts import FUSED, corrected_sigmoid
from octavo.models.families.moe import after_dense
from octavo.models.hf_config import Config, WithDefaults, only, value_or, whole
from octavo.models.hf_decoder import (
    activation,
    decoder_spec,
    head_size,
    layer_types,
    mlp_spec,
    rms_norm,
    sliding_windows,
)
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import POST, PRE, DecoderSpec, HeadNorms, NormSpec, StoredNames, renamed

_LAYER = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.attention.q_proj": "self_attn.q_proj",
    "attn.attention.k_proj": "self_attn.k_proj",
    "attn.attention.v_proj": "self_attn.v_proj",
    "attn.attention.out_proj": "self_attn.o_proj",
    "mlp.c_fc_0": "mlp.gate_proj",
    "mlp.c_fc_1": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_K_EXAONE = StoredNames(
    modules=renamed({"layers.{}.mlp.e_score_correction_bias": "layers.{}.mlp.gate.e_score_correction_bias"}),
    stacks=FUSED,
    foreign=("mtp.",),
)
_EXAONE3 = StoredNames(
    "transformer",
    renamed(
        {"wte": "embed_tokens", "ln_f": "norm"}
        | {f"h.{{}}.{theirs}": f"layers.{{}}.{ours}" for theirs, ours in _LAYER.items()}
    ),
)


def exaone3(config: Config) -> DecoderSpec:
    """EXAONE 3: Llama with other names (https://arxiv.org/abs/2408.03541)."""
    named = {**config, "num_hidden_layers": whole(config, "num_layers", config.get("num_hidden_layers"))}
    norm = NormSpec(float(config.get("layer_norm_epsilon") or 1e-5))
    mlp = mlp_spec(config, activation(config, "activation_function"))
    return decoder_spec(named, norm=norm, mlp=mlp, stored=_EXAONE3)


def exaone4(config: Config) -> DecoderSpec:
    """EXAONE 4: norms after each part; layers without a window have no rotary positions
    (https://arxiv.org/abs/2507.11407)."""
    window = whole(config, "sliding_window", 4096) if config.get("sliding_window", 4096) else None
    types = layer_types(config, _pattern(config) if window else 0)
    norm, rope = rms_norm(config, default=1e-5), rope_spec(config, head_size(config))
    plain = no_rope(head_size(config), rope.max_position)
    return decoder_spec(
        config,
        norm=norm,
        norms=POST,
        head_norms=HeadNorms(norm),
        windows=sliding_windows(types, window),
        rope=rope,
        ropes=tuple(plain if window and kind == "full_attention" else rope for kind in types),
    )


def exaone_moe(config: Config) -> DecoderSpec:
    """K-EXAONE (https://huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B): EXAONE 4 with experts and norms before each
    part."""
    only(config, "scoring_func", "sigmoid")
    named = WithDefaults(
        config,
        n_shared_experts=value_or(config, "num_shared_experts", 1),
        routed_scaling_factor=2.5,
    )
    mlps = after_dense(named, corrected_sigmoid(named, 8, normalized=True), 1, 64)
    return replace(exaone4(config), norms=PRE, mlps=mlps, stored=_K_EXAONE)


def _pattern(config: Config) -> int:
    """Return the number of layers per full layer; the 32B's config spells the layers of a period: "LLLG"."""
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    return whole(config, "sliding_window_pattern", 4)
