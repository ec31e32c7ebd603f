"""Fields of recurrent and hybrid models in GGUF metadata. Keys and defaults are those of llama.cpp (`src/models/`)."""

from __future__ import annotations

from typing import Any

from octavo.hub import gguf_experts as experts
from octavo.hub.gguf_keys import Keys


def _attends(keys: Keys) -> list[bool]:
    """Return which layers have attention: those with key-value heads."""
    heads = keys.each("attention.head_count_kv", 0)
    return [count > 0 for count in heads] if isinstance(heads, list) else [heads > 0] * keys.need("block_count")


def _layers(keys: Keys, recurrent: str) -> list[str]:
    return ["full_attention" if attends else recurrent for attends in _attends(keys)]


def lfm2(keys: Keys) -> dict[str, Any]:
    return {
        "layer_types": _layers(keys, "conv"),
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(keys: Keys) -> dict[str, Any]:
    fields = experts.after_dense(keys)
    return {
        **fields,
        **lfm2(keys),
        "num_dense_layers": fields["first_k_dense_replace"],
        "norm_topk_prob": True,
        "use_expert_bias": True,
    }


def mamba(keys: Keys) -> dict[str, Any]:
    """Falcon-Mamba is stored as a Mamba with norms of step sizes, inputs and outputs."""
    fields: dict[str, Any] = {
        "intermediate_size": keys.need("ssm.inner_size"),
        "state_size": keys.need("ssm.state_size"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
        "time_step_rank": keys.need("ssm.time_step_rank"),
        "use_bias": keys.has("blk.0.ssm_in.bias"),
        "use_conv_bias": keys.has("blk.0.ssm_conv1d.bias"),
    }
    if keys.get("ssm.dt_b_c_rms", False):
        eps = keys.get("attention.layer_norm_rms_epsilon") or keys.need("attention.layer_norm_epsilon")
        fields |= {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "mixer_rms_eps": eps}
    return fields


def mamba2(keys: Keys) -> dict[str, Any]:
    heads = keys.need("ssm.time_step_rank")
    return {
        "num_heads": heads,
        "head_dim": keys.need("ssm.inner_size") // heads,
        "state_size": keys.need("ssm.state_size"),
        "n_groups": keys.need("ssm.group_count"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
        "use_bias": keys.has("blk.0.ssm_in.bias"),
        "use_conv_bias": keys.has("blk.0.ssm_conv1d.bias"),
    }


def _every(chosen: list[bool], name: str) -> dict[str, int]:
    """Return the period and the offset of the chosen layers."""
    places = [i for i, one in enumerate(chosen) if one]
    period = places[1] - places[0] if len(places) > 1 else len(chosen)
    return {f"{name}_period": period, f"{name}_offset": places[0] if places else len(chosen)}


def jamba(keys: Keys) -> dict[str, Any]:
    layers = range(keys.need("block_count"))
    sparse = [keys.has(f"blk.{i}.ffn_gate_inp.weight") for i in layers]
    counts = experts.counts(keys) | _every(sparse, "expert_layer") if any(sparse) else {}
    return {
        "num_experts": counts.get("num_local_experts", 1),
        **counts,
        **_every(_attends(keys), "attn_layer"),
        "mamba_expand": keys.need("ssm.inner_size") // keys.need("embedding_length"),
        "mamba_d_state": keys.need("ssm.state_size"),
        "mamba_d_conv": keys.need("ssm.conv_kernel"),
        "mamba_dt_rank": keys.need("ssm.time_step_rank"),
    }


def granite_hybrid(keys: Keys) -> dict[str, Any]:
    """Attention has rotary positions where the file says that they were trained."""
    heads, inner = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    sparse = keys.get("expert_count", 0) > 0
    size = keys.need("expert_shared_feed_forward_length" if sparse else "feed_forward_length")
    return {
        **(experts.counts(keys) if sparse else {"num_local_experts": 0}),
        "layer_types": _layers(keys, "mamba"),
        "shared_intermediate_size": size,
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", False) else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // keys.need("embedding_length"),
        "mamba_d_state": keys.need("ssm.state_size"),
        "mamba_n_groups": keys.need("ssm.group_count"),
        "mamba_d_conv": keys.need("ssm.conv_kernel"),
    }


def qwen3_next(keys: Keys) -> dict[str, Any]:
    return {
        **experts.qwen3(keys),
        "num_experts": keys.need("expert_count"),
        "full_attention_interval": keys.get("full_attention_interval", 4),
        **_delta(keys),
    }


def qwen3_5(keys: Keys) -> dict[str, Any]:
    """Layers that predict further tokens are counted, too."""
    layers, period = (
        keys.need("block_count") - keys.get("nextn_predict_layers", 0),
        keys.get("full_attention_interval", 4),
    )
    recurrent = keys.each("attention.recurrent_layers") or [(i + 1) % period > 0 for i in range(layers)]
    kinds = ["linear_attention" if one else "full_attention" for one in recurrent[:layers]]
    return {"num_hidden_layers": layers, "layer_types": kinds, **_delta(keys)}


def qwen3_5_moe(keys: Keys) -> dict[str, Any]:
    return {**experts.qwen3(keys), **qwen3_5(keys)}


def _delta(keys: Keys) -> dict[str, Any]:
    heads = keys.need("ssm.time_step_rank")
    return {
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys.need("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
    }


def nemotron_h(keys: Keys) -> dict[str, Any]:
    """A layer with neither key-value heads nor a feed-forward is a state space."""
    sizes = keys.each("feed_forward_length")
    inner = max(sizes) if isinstance(sizes, list) else sizes
    kinds = []
    for i, attends in enumerate(_attends(keys)):
        feeds = keys.has(f"blk.{i}.ffn_up.weight")
        sparse = keys.has(f"blk.{i}.ffn_gate_inp.weight")
        kinds.append("moe" if sparse else "mlp" if feeds else "attention" if attends else "mamba")
    fields = (
        {}
        if "moe" not in kinds
        else experts.after_dense(keys)
        | {
            "n_routed_experts": keys.need("expert_count"),
            "moe_shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
        }
    )
    return {
        **fields,
        "layers_block_type": kinds,
        "intermediate_size": inner,
        "mamba_num_heads": keys.need("ssm.time_step_rank"),
        "mamba_head_dim": keys.need("ssm.inner_size") // keys.need("ssm.time_step_rank"),
        "ssm_state_size": keys.need("ssm.state_size"),
        "n_groups": keys.need("ssm.group_count"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
    }
