"""Fields of mixtures of experts in GGUF metadata. Keys and defaults are those of llama.cpp (`src/llama-model.cpp`)."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_keys import Keys
from octavo.hub.gguf_latent import latent

_SCORES = {0: "softmax", 1: "softmax", 2: "sigmoid"}
"""llama.cpp's numbers of the functions of a router's outputs (`expert_gating_func`); 0 is for files without one."""


def counts(keys: Keys) -> dict[str, Any]:
    """Return the number of experts, and how many a token uses."""
    return {"num_local_experts": keys.need("expert_count"), "num_experts_per_tok": keys.need("expert_used_count")}


def mixtral(keys: Keys) -> dict[str, Any]:
    """Mixtral is stored as a Llama with experts."""
    if not keys.get("expert_count", 0):
        return {}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **counts(keys)}


def qwen(keys: Keys, *, normalized: bool) -> dict[str, Any]:
    """Return Qwen's fields, of experts that are smaller than a dense feed-forward.

    Args:
        normalized: whether a token's weights sum to one, which is not in the file.
    """
    inner = keys.need("feed_forward_length")
    return {
        **counts(keys),
        "moe_intermediate_size": keys.get("expert_feed_forward_length") or inner // keys.need("expert_used_count"),
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length") or inner,
        "norm_topk_prob": normalized,
    }


def qwen2(keys: Keys) -> dict[str, Any]:
    return qwen(keys, normalized=False)


def qwen3(keys: Keys) -> dict[str, Any]:
    return qwen(keys, normalized=True)


def phi(keys: Keys) -> dict[str, Any]:
    return {**counts(keys), "lm_head_bias": keys.has("output.bias")}


def olmoe(keys: Keys) -> dict[str, Any]:
    return {**counts(keys), "norm_topk_prob": False, "clip_qkv": keys.get("attention.clamp_kqv")}


def after_dense(keys: Keys) -> dict[str, Any]:
    """Return the fields of DeepSeek's kind of experts: after some dense layers, beside shared ones, in groups."""
    return {
        **counts(keys),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "n_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        "scoring_func": _scores(keys),
    }


def _scores(keys: Keys) -> str:
    number = keys.get("expert_gating_func", 0)
    if number not in _SCORES:
        raise ModelFileError(
            f"{keys.file.path}: {keys.arch}.expert_gating_func is {number}; supported are 1 (softmax) and 2 (sigmoid). "
            "Use the model's safetensors checkpoint instead."
        )
    return _SCORES[number]


def with_prediction(keys: Keys) -> dict[str, Any]:
    """Return the same for files whose last layers predict further tokens; these are not part of the model."""
    layers = keys.need("block_count") - keys.get("nextn_predict_layers", 0)
    return {**after_dense(keys), "num_hidden_layers": layers}


def glm4(keys: Keys) -> dict[str, Any]:
    """GLM-4.5, and Solar Open, which has no norms of queries and keys."""
    return {**with_prediction(keys), "use_qk_norm": keys.has("blk.0.attn_q_norm.weight")}


def afmoe(keys: Keys) -> dict[str, Any]:
    """Files without a router's function are of sigmoids; embeddings are scaled in all."""
    fields = after_dense(keys)
    return {
        **fields,
        "num_dense_layers": fields["first_k_dense_replace"],
        "num_shared_experts": fields["n_shared_experts"],
        "route_norm": fields["norm_topk_prob"],
        "route_scale": fields["routed_scaling_factor"],
        "score_func": fields["scoring_func"] if keys.get("expert_gating_func", 0) else "sigmoid",
        "mup_enabled": True,
    }


def hunyuan(keys: Keys) -> dict[str, Any]:
    """The shared feed-forward is as wide as a dense one would be."""
    return {
        "num_experts": keys.need("expert_count"),
        "moe_topk": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "num_shared_expert": keys.get("expert_shared_count", 1),
    }


def minimax(keys: Keys) -> dict[str, Any]:
    return {**counts(keys), "intermediate_size": keys.need("expert_feed_forward_length"), "scoring_func": _scores(keys)}


def deepseek(keys: Keys) -> dict[str, Any]:
    """DeepSeek V2, and V3 or GLM-4.7-Flash by the router with sigmoids."""
    fields = with_prediction(keys)
    later = fields["scoring_func"] == "sigmoid"
    names = ("DeepseekV3ForCausalLM", "deepseek_v3") if later else ("DeepseekV2ForCausalLM", "deepseek_v2")
    return {
        **fields,
        **latent(keys),
        "architectures": [names[0]],
        "model_type": names[1],
        "topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy",
        "rope_parameters": _deepseek_rope(keys),
    }


def _deepseek_rope(keys: Keys) -> dict[str, Any]:
    """Return YaRN with the weight of its temperature, which is the same for scores as for cosines and sines."""
    base = {"rope_theta": keys.get("rope.freq_base", 10000.0)}
    if keys.get("rope.scaling.type", "none") != "yarn":
        return {**base, "rope_type": "default"}
    weight = keys.get("rope.scaling.yarn_log_multiplier", 0.0) * 10
    return {
        **base,
        "rope_type": "yarn",
        "factor": keys.need("rope.scaling.factor"),
        "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        "mscale": weight,
        "mscale_all_dim": weight,
    }


def ernie(keys: Keys) -> dict[str, Any]:
    return {
        "moe_num_experts": keys.need("expert_count"),
        "moe_k": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
    }


def gpt_oss(keys: Keys) -> dict[str, Any]:
    """Unlike other models with YaRN, its frequencies are not rounded to whole channels; files do not say so."""
    scaling = {
        "rope_type": "yarn",
        "rope_theta": keys.get("rope.freq_base", 150000.0),
        "factor": keys.need("rope.scaling.factor"),
        "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        "truncate": False,
    }
    return {
        **counts(keys),
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "rope_parameters": scaling,
    }


def llama4(keys: Keys) -> dict[str, Any]:
    """What is not in files is taken as llama.cpp takes it: layers without rotary positions, chunks, temperatures; and
    norms of heads for all but Maverick, of 128 experts."""
    return {
        **counts(keys),
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.need("feed_forward_length"),
        "interleave_moe_layer_step": keys.need("interleave_moe_layer_step"),
        "no_rope_layer_interval": 4,
        "attention_chunk_size": keys.get("attention.chunk_size", 8192),
        "use_qk_norm": keys.need("expert_count") != 128,
    }
