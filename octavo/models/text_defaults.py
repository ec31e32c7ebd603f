"""Defaults of Transformers' configurations of text models.

A nested configuration, as published, states only what differs from them; one of a checkpoint of its own states all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int, eps: float = 1e-6
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
    }


_LLAMA: Mapping[str, Any] = {
    name: value
    for name, value in _sizes(4096, 11008, 32, 32, 32, 32000, 2048).items()
    if name != "num_key_value_heads"  # as many as heads
}
_EXAONE4 = _sizes(4096, 16384, 32, 32, 32, 102400, 2048, 1e-5)
_GEMMA4 = _sizes(2304, 9216, 30, 8, 4, 262144, 131072) | {"head_dim": 256, "tie_word_embeddings": True}
_QWEN_VL = _sizes(8192, 29568, 80, 64, 8, 152064, 32768, 1e-5) | {"max_window_layers": 80, "rope_theta": 1000000.0}
_QWEN3_5 = _sizes(4096, 12288, 32, 16, 4, 248320, 32768)
_MINISTRAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cohere2": _sizes(8192, 22528, 40, 64, 64, 256000, 8192),
    "exaone4": _EXAONE4,
    "exaone4_5_text": _EXAONE4,
    "gemma3_text": _sizes(2304, 9216, 26, 8, 4, 262208, 131072) | {"head_dim": 256, "tie_word_embeddings": True},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4 | {"max_position_embeddings": 262144},
    "glm4v_text": _sizes(4096, 13696, 40, 32, 2, 151552, 32768, 1e-5),
    "gpt_oss": _sizes(2880, 2880, 36, 64, 8, 201088, 131072, 1e-5),
    "granite": _LLAMA,
    "lfm2": _sizes(2560, 12288, 32, 32, 8, 65536, 128000),
    "llama": _LLAMA,
    "llama4_text": _sizes(5120, 8192, 48, 40, 8, 202048, 131072, 1e-5),
    "ministral3": _sizes(4096, 14336, 34, 32, 8, 131072, 262144, 1e-5)
    | {"head_dim": 128, "rope_parameters": _MINISTRAL_YARN},
    "mistral": _sizes(4096, 14336, 32, 32, 8, 32000, 131072),
    "mistral4": _sizes(4096, 12288, 36, 32, 32, 131072, 1048576)
    | {
        "rope_parameters": _MINISTRAL_YARN
        | {"rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
    },
    "qwen2": _sizes(4096, 22016, 32, 32, 32, 151936, 32768),
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen3": _sizes(4096, 22016, 32, 32, 32, 151936, 32768),
    "qwen3_moe": _sizes(2048, 6144, 24, 32, 4, 151936, 32768) | {"moe_intermediate_size": 768},
    "qwen3_5_moe_text": _QWEN3_5
    | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_vl_moe_text": _sizes(2048, 5632, 24, 16, 16, 151936, 128000)
    | {
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_local_experts": 60,  # newer files have this name of it, and older ones another, which comes first
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_text": _sizes(4096, 22016, 32, 32, 32, 151936, 128000) | {"rope_theta": 500000.0},
}
"""`model_type` -> fields whose defaults differ from those that the families take."""
