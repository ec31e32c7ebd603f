"""Tiny configurations of every family of decoders beside those of `tiny.py`, each with what is special about it."""

from __future__ import annotations

from typing import Any

import transformers
from tiny_recent import RECENT_DENSE, RECENT_HYBRID, RECENT_MOE

_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
_LONG = [1.0 + i / 4 for i in range(6)]
_SHORT = [1.0 + i / 16 for i in range(6)]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": _LONG,
    "short_factor": _SHORT,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
}
_GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
}

_GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_key_value_heads": 4,
    "sliding_window": 7,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "hidden_size_per_layer_input": 0,
}
_UNIFIED = {name: value for name, value in _GEMMA4.items() if name != "hidden_size_per_layer_input"}
_GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0, "factor": 2.0},
}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "num_hidden_layers": 2,
}
"""Latent attention with widths that differ from each other, in multiples of 16."""
_ODD = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
"""Widths that the CPU's native program lacks."""
_MSCALE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
"""YaRN as DeepSeek has it: the temperature is a factor of the scores, and cosines and sines have a ratio of two."""
_LATENT_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + i / 4 for i in range(8)],
    "short_factor": [1.0 + i / 20 for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

DENSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "bloom": (transformers.BloomConfig, {"num_attention_heads": 6, "hidden_size": 96}),
    "cohere": (transformers.CohereConfig, {"use_qk_norm": True}),
    "cohere2": (transformers.Cohere2Config, {"sliding_window": 7, "sliding_window_pattern": 3}),
    "ernie": (transformers.Ernie4_5Config, {"head_dim": 16, "use_bias": True}),
    "exaone4": (transformers.Exaone4Config, {"sliding_window": 7, "sliding_window_pattern": 3}),
    "exaone4-full": (transformers.Exaone4Config, {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "falcon": (transformers.FalconConfig, {}),
    "falcon-new": (transformers.FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-one-norm": (
        transformers.FalconConfig,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": (
        transformers.FalconConfig,
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "gemma": (transformers.GemmaConfig, {"head_dim": 32, "intermediate_size": 101}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 32,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "rope_parameters": _GEMMA3_ROPES,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4": (
        transformers.Gemma4TextConfig,
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
    ),
    "gemma4-small": (
        transformers.Gemma4TextConfig,
        {
            **_GEMMA4,
            "num_global_key_value_heads": None,
            "num_key_value_heads": 1,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 199,
        },
    ),
    "gemma4-unified": (transformers.Gemma4UnifiedTextConfig, {**_UNIFIED, "rope_parameters": _GEMMA4_ROPES}),
    "glm": (transformers.GlmConfig, {"head_dim": 16}),
    "glm4": (transformers.Glm4Config, {"head_dim": 16}),
    "gpt-neox": (transformers.GPTNeoXConfig, {"hidden_act": "gelu"}),
    "gpt-neox-serial": (transformers.GPTNeoXConfig, {"use_parallel_residual": False, "rotary_pct": 1.0}),
    "gpt2": (transformers.GPT2Config, _GPT),
    "gptj": (transformers.GPTJConfig, {**_GPT, "rotary_dim": 8}),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
    "helium": (transformers.HeliumConfig, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "minicpm3": (
        transformers.MiniCPM3Config,
        {
            **_LATENT,
            "rope_parameters": _LATENT_LONGROPE,
            "dim_model_base": 16,
            "scale_depth": 0.9,
            "attention_bias": True,
        },
    ),
    "nemotron": (transformers.NemotronConfig, {"attention_bias": True}),
    "olmo": (transformers.OlmoConfig, {"clip_qkv": 0.8}),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (
        transformers.Olmo3Config,
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "opt": (transformers.OPTConfig, {"ffn_dim": 112, "word_embed_proj_dim": 64}),
    "opt-plain-norms": (
        transformers.OPTConfig,
        {"ffn_dim": 112, "word_embed_proj_dim": 64, "layer_norm_elementwise_affine": False, "enable_bias": False},
    ),
    "phi": (transformers.PhiConfig, {"qk_layernorm": True}),
    "phi3": (transformers.Phi3Config, {"sliding_window": 9}),
    "phi3-longrope": (transformers.Phi3Config, {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32}),
    "seed-oss": (transformers.SeedOssConfig, {"head_dim": 32}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "stablelm": (transformers.StableLmConfig, {"use_qkv_bias": True}),
    "stablelm-parallel": (transformers.StableLmConfig, {"use_parallel_residual": True}),
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": 7}),
    "youtu": (transformers.YoutuConfig, {**_LATENT, "rope_parameters": _MSCALE}),
    "youtu-direct": (transformers.YoutuConfig, {**_LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "youtu-odd": (transformers.YoutuConfig, {**_LATENT, **_ODD, "q_lora_rank": 20}),
    **RECENT_DENSE,
}

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_INTERLEAVED = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
_SMALL = {"expand": 2, "state_size": 8, "tie_word_embeddings": False}
HYBRID: dict[str, tuple[Any, dict[str, Any]]] = {
    "bamba": (
        transformers.BambaConfig,
        {**_SSM, "attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True},
    ),
    "falcon-mamba": (transformers.FalconMambaConfig, {**_SMALL, "num_hidden_layers": 2}),
    "granite-hybrid": (
        transformers.GraniteMoeHybridConfig,
        {
            **_SSM,
            "mamba_proj_bias": True,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
    "jamba": (
        transformers.JambaConfig,
        {"mamba_d_state": 8, "num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 5},
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16, "conv_bias": True},
    ),
    "mamba": (transformers.MambaConfig, {**_SMALL, "num_hidden_layers": 2, "use_bias": True}),
    "mamba2": (
        transformers.Mamba2Config,
        {
            **_SMALL,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "time_step_limit": (0.01, 0.2),
        },
    ),
    "nemotron-h": (
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "head_dim": 16,
            "time_step_min": 1e-30,
        },
    ),
    "qwen3-next": (
        transformers.Qwen3NextConfig,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 0,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    **RECENT_HYBRID,
    "qwen3.5": (
        transformers.Qwen3_5TextConfig,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 32,
            "rope_parameters": _INTERLEAVED,
            **_DELTA,
        },
    ),
}
"""Families with recurrent layers, without experts."""

_EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}
_MOE = {"num_hidden_layers": 2, "moe_intermediate_size": 24}
_SIGMOID = {
    **_MOE,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

HYBRID_MOE: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma4-experts": (
        transformers.Gemma4TextConfig,
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
            "initializer_range": 0.1,
        },
    ),
    "granite-hybrid-moe": (
        transformers.GraniteMoeHybridConfig,
        {**_SSM, **_EXPERTS, **_TWO, "intermediate_size": 24, "shared_intermediate_size": 40},
    ),
    "jamba-moe": (
        transformers.JambaConfig,
        {
            "mamba_d_state": 8,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "intermediate_size": 24,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 5,
        },
    ),
    "lfm2-moe": (
        transformers.Lfm2MoeConfig,
        {
            **_MOE,
            **_EXPERTS,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron-h-moe": (
        transformers.NemotronHConfig,
        {
            **_SIGMOID,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "head_dim": 16,
            "time_step_min": 1e-30,
            "moe_shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3-next-moe": (
        transformers.Qwen3NextConfig,
        {
            **_TWO,
            **_EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "qwen3.5-moe": (
        transformers.Qwen3_5MoeTextConfig,
        {
            **_TWO,
            **_EXPERTS,
            **_DELTA,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "rope_parameters": _INTERLEAVED,
        },
    ),
}
"""Families with recurrent layers and experts."""
_DEEPSEEK = {
    **_LATENT,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

MOE: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek-v2": (
        transformers.DeepseekV2Config,
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "rope_parameters": _MSCALE},
    ),
    "deepseek-v2-lite": (transformers.DeepseekV2Config, {**_DEEPSEEK, "q_lora_rank": None}),
    "deepseek-v3": (transformers.DeepseekV3Config, {**_DEEPSEEK, "rope_parameters": _MSCALE}),
    "moonlight": (
        transformers.DeepseekV3Config,
        {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
    "dots1": (transformers.Dots1Config, {**_SIGMOID, "n_group": 2, "topk_group": 1, "num_hidden_layers": 2}),
    "ernie-moe": (
        transformers.Ernie4_5_MoeConfig,
        {**_MOE, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "use_bias": False},
    ),
    "glm4-moe": (transformers.Glm4MoeConfig, {**_SIGMOID, "use_qk_norm": True, "attention_bias": True}),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            **_EXPERTS,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "head_dim": 16,
            "sliding_window": 7,
            "swiglu_limit": 0.6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "granite-moe": (
        transformers.GraniteMoeConfig,
        {**_EXPERTS, "num_hidden_layers": 2, "intermediate_size": 24, "attention_multiplier": 0.2},
    ),
    "llama4": (
        transformers.Llama4TextConfig,
        {
            "num_local_experts": 4,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 12,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {**_EXPERTS, "num_hidden_layers": 2, "intermediate_size": 24, "sliding_window": 7},
    ),
    "olmoe": (transformers.OlmoeConfig, {**_EXPERTS, "num_hidden_layers": 2, "intermediate_size": 24}),
    "phi-moe": (
        transformers.PhimoeConfig,
        {
            **_EXPERTS,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "long_factor": [1.0 + i / 4 for i in range(8)],
                "short_factor": [1.0 + i / 4 for i in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig,
        {**_MOE, **_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": (transformers.Qwen3MoeConfig, {**_MOE, **_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    **RECENT_MOE,
}
"""Mixtures of experts, each with dense layers where the family has them."""
