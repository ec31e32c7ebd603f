"""Fields of latent attention in GGUF metadata. Keys and defaults are those of llama.cpp (`src/llama-model.cpp`)."""

from __future__ import annotations

from typing import Any

from octavo.hub.gguf_keys import Keys


def latent(keys: Keys) -> dict[str, Any]:
    """Return the sizes of latents and heads. Newer converters store latent attention as that of one key per token, and
    give the sizes of heads apart."""
    heads, rotated = keys.need("attention.head_count"), keys.need("rope.dimension_count")
    return {
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": (keys.get("attention.key_length_mla") or keys.need("attention.key_length")) - rotated,
        "v_head_dim": keys.get("attention.value_length_mla")
        or keys.get("attention.value_length", keys.need("embedding_length") // heads),
        "head_dim": None,
        "num_key_value_heads": heads,
        "partial_rotary_factor": 1.0,
    }


def minicpm3(keys: Keys) -> dict[str, Any]:
    """The multipliers are not in files; llama.cpp takes these, the defaults of the model's configuration."""
    return {**latent(keys), "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
