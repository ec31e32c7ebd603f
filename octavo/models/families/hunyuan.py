"""Tencent's Hunyuan and Hy."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.errors import ConfigError
from octavo.models.families.experts import FUSED, experts_of
from octavo.models.families.moe import after_dense
from octavo.models.feed_forwards.spec import SharedSpec
from octavo.models.hf_config import Config, WithDefaults, only, value_or, whole
from octavo.models.hf_decoder import bias_set, decoder_spec, head_size, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import DecoderSpec, HeadNorms, StoredNames, renamed
from octavo.nn.experts_spec import RoutingSpec
from octavo.nn.rope_spec import RopeSpec

_CORRECTION = "layers.{}.mlp.gate.e_score_correction_bias"
_PARTS = (("query", "q"), ("key", "k"))
_SHARED = {
    f"layers.{{}}.mlp.shared_mlp.{part}_proj": f"layers.{{}}.mlp.shared_experts.{part}_proj"
    for part in ("gate", "up", "down")
}
_HY3 = StoredNames(
    modules=renamed(
        {
            "layers.{}.mlp.router.gate": "layers.{}.mlp.gate",
            "layers.{}.mlp.expert_bias": _CORRECTION,
            "layers.{}.mlp.e_score_correction_bias": _CORRECTION,  # in transformers 5
            **_SHARED,
        }
    ),
    stacks=FUSED,
)


_HEADS = {f"layers.{{}}.self_attn.{theirs}_layernorm": f"layers.{{}}.self_attn.{ours}_norm" for theirs, ours in _PARTS}
_V1 = StoredNames(
    modules=renamed({**_HEADS, "layers.{}.mlp.gate.wg": "layers.{}.mlp.gate", **_SHARED}),
    stacks=FUSED,
)


def hunyuan(config: Config) -> DecoderSpec:
    """Hunyuan, the dense sizes (https://huggingface.co/tencent/Hunyuan-7B-Instruct): norms of rotated queries and
    keys."""
    only(config, "use_cla", False)
    only(config, "mlp_bias", False)
    norm = rms_norm(config, default=1e-5)
    return decoder_spec(
        config,
        norm=norm,
        rope=_stretched_rope(config),
        head_norms=HeadNorms(norm, rotated=True) if value_or(config, "use_qk_norm", True) else None,
        biases=bias_set(config, mlp=""),
        stored=_V1,
    )


def hunyuan_moe(config: Config) -> DecoderSpec:
    """Hunyuan-A13B (https://huggingface.co/tencent/Hunyuan-A13B-Instruct): experts beside a shared feed-forward."""
    only(config, "moe_layer_num_skipped", 0)
    inner = whole(config, "intermediate_size")
    routing = RoutingSpec(top_k=_of_all(config, "moe_topk", 1), scores="chosen")
    sizes = {"num_experts": _of_all(config, "num_experts", 1), "size": _of_all(config, "moe_intermediate_size", inner)}
    shared = SharedSpec(inner * _of_all(config, "num_shared_expert", 1))
    experts = experts_of({**config, **sizes}, routing, "num_experts", "size", None, shared)
    return replace(hunyuan(config), mlps=(experts,) * whole(config, "num_hidden_layers"))


def _stretched_rope(config: Config) -> RopeSpec:
    """Return rotary settings with a base that `alpha` stretches for long contexts, which the configuration calls
    dynamic."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    params, dim = dict(value_or(config, field, {})), head_size(config)
    alpha = params.get("alpha")
    if not alpha:
        return rope_spec(config, dim)
    base = float(params.get("rope_theta") or value_or(config, "rope_theta", 10000.0))
    theta = base * float(alpha) ** (dim / (dim - 2))
    return rope_spec({**config, field: {"rope_type": "default", "rope_theta": theta}}, dim)


def _of_all(config: Config, name: str, default: int) -> int:
    """Return a positive integer field that may be a list of one for each layer.

    Raises:
        ConfigError: layers differ.
    """
    value = config.get(name)
    if not isinstance(value, list) or not value:
        return whole(config, name, default)
    if len(set(value)) > 1:
        raise ConfigError(f"The model's config has {name}={value}; Octavo supports one number for all layers.")
    return whole({name: value[0]}, name)


def hy3(config: Config) -> DecoderSpec:
    """Hy3 (https://huggingface.co/tencent/Hy3-preview)."""
    only(config, "mlp_bias", False)
    norm, head_dim = rms_norm(config, default=1e-5), head_size(config, 128)
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 8),
        scores="sigmoid",
        corrected=True,
        normalized=True,
        scaling=float(value_or(config, "router_scaling_factor", 2.826)),
    )
    named = WithDefaults(config, n_shared_experts=value_or(config, "num_shared_experts", 1))
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        rope=rope_spec(config, head_dim, theta=11158840.0),
        head_norms=HeadNorms(norm),
        mlps=after_dense(named, routing, 1, 192),
        biases=bias_set(config, mlp=""),
        stored=_HY3,
    )
