"""Families with latent attention: DeepSeek V2 and V3 (also R1, Kimi K2, Moonlight), GLM-4.7-Flash, Mistral Small 4,
MiniCPM 3, Youtu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.families.experts import corrected_sigmoid
from octavo.models.families.mistral import sharpening
from octavo.models.families.moe import PER_EXPERT, after_dense
from octavo.models.hf_config import Config, WithDefaults, only, require, value_or, whole
from octavo.models.hf_decoder import decoder_spec, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.hf_rope import temperature as yarn_temperature
from octavo.models.mixers.spec import LatentSelfAttention, Temperature
from octavo.models.spec import DecoderSpec, Multipliers
from octavo.nn.experts_spec import RoutingSpec

_MISTRAL4: dict[str, Any] = {
    "kv_lora_rank": 256,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Defaults of its configuration."""


def latent_decoder(
    config: Config, *, interleaved: bool, temperature: Temperature | None = None, **parts: Any
) -> DecoderSpec:
    """Return the spec of a family whose layers all have latent attention.

    Args:
        interleaved: the family pairs adjacent rotated channels.
        temperature: of queries.
        parts: other arguments of `decoder_spec`.
    """
    only(config, "mlp_bias", False)
    layers, heads = whole(config, "num_hidden_layers"), whole(config, "num_attention_heads")
    nope, rotated = whole(config, "qk_nope_head_dim"), whole(config, "qk_rope_head_dim")
    if rotated % 2:
        raise ModelFileError(f"The model's config has qk_rope_head_dim={rotated}; rotated channels come in pairs.")
    query_rank = whole(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0
    mixer = LatentSelfAttention(
        rank=whole(config, "kv_lora_rank"),
        rope_dim=rotated,
        nope_dim=nope,
        value_dim=whole(config, "v_head_dim", whole(config, "hidden_size") // heads),
        query_rank=query_rank,
        bias=bool(query_rank and value_or(config, "attention_bias", False)),
        temperature=temperature,
    )
    if not query_rank:
        only(config, "attention_bias", False)
    rope = rope_spec(config, rotated, interleaved=interleaved)
    spec = decoder_spec(config, rope=rope, mixers=(mixer,) * layers, scale=_scale(config, nope + rotated), **parts)
    return replace(spec, head_dim=nope + rotated, num_kv_heads=heads)


def _scale(config: Config, channels: int) -> float:
    """Return the factor of scores. With a scaled rope it includes YaRN's temperature, which cosines and sines would
    otherwise have."""
    params = value_or(config, "rope_parameters", None) or value_or(config, "rope_scaling", {})
    kind = params.get("rope_type") or params.get("type") or "default"
    weight = float(params.get("mscale_all_dim") or 0.0)
    if kind == "default" or not weight:
        return float(channels**-0.5)
    return float(channels**-0.5) * yarn_temperature(float(params["factor"]), weight) ** 2


def deepseek_v2(config: Config) -> DecoderSpec:
    """DeepSeek V2 and V2 Lite (https://arxiv.org/abs/2405.04434): a token uses experts of its best groups."""
    only(config, "scoring_func", "softmax")
    method = value_or(config, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"The model's config asks for topk_method={method!r}; Octavo supports greedy and group_limited_greedy."
        )
    limited = method == "group_limited_greedy"
    only(config, "norm_topk_prob", False)
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok"),
        groups=whole(config, "n_group") if limited else 1,
        top_groups=whole(config, "topk_group") if limited else 1,
        scaling=float(value_or(config, "routed_scaling_factor", 1.0)),
    )
    mlps = after_dense(config, routing, 0)
    return latent_decoder(config, interleaved=True, mlps=mlps, stored=PER_EXPERT)


def deepseek_v3(config: Config) -> DecoderSpec:
    """DeepSeek V3 and R1, Kimi K2, Moonlight (https://arxiv.org/abs/2412.19437)."""
    only(config, "scoring_func", "sigmoid")
    config = WithDefaults(config, n_group=8, topk_group=4, n_shared_experts=1, routed_scaling_factor=2.5)
    mlps = after_dense(config, corrected_sigmoid(config, 8, normalized=True), 3)
    interleaved = bool(value_or(config, "rope_interleave", True))
    return latent_decoder(config, interleaved=interleaved, mlps=mlps, stored=PER_EXPERT)


def glm4_moe_lite(config: Config) -> DecoderSpec:
    """GLM-4.7-Flash (https://huggingface.co/zai-org/GLM-4.7-Flash): latent attention, experts after a dense layer."""
    only(config, "scoring_func", "sigmoid")
    config = WithDefaults(config, n_shared_experts=1, routed_scaling_factor=1.8)
    mlps = after_dense(config, corrected_sigmoid(config, 4, normalized=True), 1, 64)
    interleaved, norm = bool(value_or(config, "rope_interleave", True)), rms_norm(config, default=1e-5)
    return latent_decoder(config, interleaved=interleaved, norm=norm, mlps=mlps, stored=PER_EXPERT)


def mistral4(config: Config) -> DecoderSpec:
    """Mistral Small 4 (https://huggingface.co/mistralai/Mistral-Small-4-119B-2603): latent attention, whose queries are
    scaled up with their position; experts."""
    rope = dict(require(config, "rope_parameters"))
    config = WithDefaults(config, **_MISTRAL4)
    nope, rotated = whole(config, "qk_nope_head_dim"), whole(config, "qk_rope_head_dim")
    only(rope, "partial_rotary_factor", rotated / (nope + rotated))  # of a head's channels
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 4),
        groups=whole(config, "n_group", 1),
        top_groups=whole(config, "topk_group", 1),
        group_score="top2",
        normalized=bool(value_or(config, "norm_topk_prob", True)),
        scaling=float(value_or(config, "routed_scaling_factor", 1.0)),
    )
    return latent_decoder(
        {**config, "rope_parameters": rope | {"partial_rotary_factor": 1.0}},
        interleaved=bool(value_or(config, "rope_interleave", True)),
        temperature=sharpening(rope),
        mlps=after_dense(config, routing, 0, 128),
        stored=PER_EXPERT,
    )


def minicpm3(config: Config) -> DecoderSpec:
    """MiniCPM 3 (https://huggingface.co/openbmb/MiniCPM3-4B).

    Null in a multiplier's field means no multiplier.
    """
    hidden, layers = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    depth, base = config.get("scale_depth", 1.4), config.get("dim_model_base", 256)
    multipliers = Multipliers(
        embedding=float(value_or(config, "scale_emb", 12.0)),
        residual=1.0 if depth is None else float(depth) / layers**0.5,
        logits=1.0 if base is None else float(base) / hidden,
    )
    norm = rms_norm(config, default=1e-5)
    return latent_decoder(config, interleaved=False, multipliers=multipliers, norm=norm, tied=True)


def youtu(config: Config) -> DecoderSpec:
    """Youtu-LLM (https://huggingface.co/tencent/Youtu-LLM-2B)."""
    return latent_decoder(config, interleaved=bool(value_or(config, "rope_interleave", True)), tied=True)
