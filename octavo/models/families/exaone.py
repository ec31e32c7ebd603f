"""EXAONE 3 and 4."""

from __future__ import annotations

from octavo.models.hf_config import Config, whole
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
from octavo.models.spec import POST, DecoderSpec, HeadNorms, NormSpec, StoredNames, renamed

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


def _pattern(config: Config) -> int:
    """Return the number of layers per full layer; the 32B's config spells the layers of a period: "LLLG"."""
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    return whole(config, "sliding_window_pattern", 4)
