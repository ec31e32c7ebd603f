"""Tiny configurations of families of 2025 and 2026, each with what is special about it; parts of those in
`tiny_families.py`."""

from __future__ import annotations

from typing import Any

import transformers

_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_PATTERN = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2, "intermediate_size": 24}
_ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 4.0}

RECENT_DENSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "apertus": (transformers.ApertusConfig, {"attention_bias": True}),
    "arcee": (transformers.ArceeConfig, {"attention_bias": True}),
    "granite-swa": (
        transformers.GraniteSWAConfig,
        {**_WINDOWS, **_GRANITE, "layer_rope_theta": [100.0, 0, 1000.0], "attention_bias": True},
    ),
    "hunyuan": (
        transformers.HunYuanDenseV1Config,
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0},
        },
    ),
    "hyperclova-x": (
        transformers.HyperCLOVAXConfig,
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 0.25},
    ),
    "jais2": (transformers.Jais2Config, {}),
    "ministral": (transformers.MinistralConfig, {**_WINDOWS, "head_dim": 32}),
    "nanochat": (transformers.NanoChatConfig, {"num_key_value_heads": 2}),
    "vaultgemma": (
        transformers.VaultGemmaConfig,
        {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    ),
}

RECENT_HYBRID: dict[str, tuple[Any, dict[str, Any]]] = {
    "lfm3": (
        transformers.Lfm3Config,
        {
            "head_dim": 16,
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "sliding_window": 7,
            "conv_bias": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
}

RECENT_MOE: dict[str, tuple[Any, dict[str, Any]]] = {
    "afmoe": (
        transformers.AfmoeConfig,
        {
            **_EXPERTS,
            **_PATTERN,
            "head_dim": 16,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "mup_enabled": True,
            "attention_bias": True,
        },
    ),
    "cohere2-moe": (
        transformers.Cohere2MoeConfig,
        {
            **_LOCAL,
            "num_experts": 6,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 40,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
        },
    ),
    "cohere2-moe-softmax": (
        transformers.Cohere2MoeConfig,
        {**_LOCAL, **_PATTERN, "num_experts": 6, "head_dim": 16, "rms_norm_eps": 1e-5},
    ),
    "exaone-moe": (transformers.ExaoneMoeConfig, {**_EXPERTS, **_PATTERN, "head_dim": 16, "num_shared_experts": 2}),
    "flint": (
        transformers.FlintConfig,
        {**_EXPERTS, **_PATTERN, "head_dim": 16, "mlp_only_layers": [1], "shared_expert_intermediate_size": 40},
    ),
    "flex-olmo": (transformers.FlexOlmoConfig, {**_EXPERTS, "intermediate_size": 24, "norm_topk_prob": True}),
    "glm4-moe-lite": (transformers.Glm4MoeLiteConfig, {**_ROUTED, **_LATENT}),
    "granite-moe-shared": (
        transformers.GraniteMoeSharedConfig,
        {**_LOCAL, **_GRANITE, "shared_intermediate_size": 40},
    ),
    "granite-moe-swa": (
        transformers.GraniteMoeSWAConfig,
        {**_LOCAL, **_PATTERN, "shared_intermediate_size": 40, "layer_rope_theta": [100.0, 0]},
    ),
    "hunyuan-moe": (
        transformers.HunYuanMoEV1Config,
        {"num_experts": 6, "moe_topk": 2, "num_hidden_layers": 2, "intermediate_size": 24, "head_dim": 16},
    ),
    "hy3": (transformers.HYV3Config, {**_EXPERTS, "head_dim": 16, "num_shared_experts": 2}),
    "mellum": (
        transformers.MellumConfig,
        {
            **_EXPERTS,
            **_PATTERN,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {**_YARN, "original_max_position_embeddings": 32},
            },
        },
    ),
    "minimax-m2": (transformers.MiniMaxM2Config, {**_LOCAL, "head_dim": 16, "rotary_dim": 8}),
    "mistral4": (
        transformers.Mistral4Config,
        {
            **_ROUTED,
            **_LATENT,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "solar-open": (transformers.SolarOpenConfig, {**_ROUTED, "head_dim": 16, "attention_bias": True}),
}
