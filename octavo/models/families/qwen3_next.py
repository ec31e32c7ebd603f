"""Qwen3-Next and Qwen3.5: gated delta nets, with a layer of gated attention after every few."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.models.families.experts import FUSED, every_nth, experts_of, softmax_routing
from octavo.models.families.mamba import layer_mixers
from octavo.models.feed_forwards.spec import ExpertsSpec, FeedForwardSpec, SharedSpec
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import decoder_spec, mlp_spec, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.mixers.spec import GatedDeltaSpec, SelfAttention
from octavo.models.spec import DecoderSpec, HeadNorms, StoredModule, StoredNames, renamed

_ATTENTION, _DELTA = "layers.{}.self_attn.", "layers.{}.linear_attn."
_SECTIONS = (11, 11, 10)


def qwen3_next(config: Config) -> DecoderSpec:
    """Qwen3-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): gated delta nets and attention, experts."""
    if value_or(config, "num_experts", 512):
        normalized = {**config, "norm_topk_prob": value_or(config, "norm_topk_prob", True)}
        mlps = every_nth(config, _experts(normalized, 512, 10))
    else:
        mlps = (mlp_spec(config, "silu"),) * whole(config, "num_hidden_layers")
    return _hybrid(config, mlps, _fused)


def qwen3_5(config: Config) -> DecoderSpec:
    """Qwen3.5, the dense sizes (https://huggingface.co/Qwen/Qwen3.5-27B): gated delta nets and attention."""
    only(config, "attn_output_gate", True)
    return _hybrid(config, (mlp_spec(config, "silu"),) * whole(config, "num_hidden_layers"), _separate, _SECTIONS)


def qwen3_5_moe(config: Config) -> DecoderSpec:
    """Qwen3.5 with experts (https://huggingface.co/Qwen/Qwen3.5-35B-A3B) in all layers."""
    for name, supported in (("attn_output_gate", True), ("norm_topk_prob", True), ("mlp_only_layers", [])):
        only(config, name, supported)
    experts = _experts({**config, "norm_topk_prob": True}, 256, 8)
    return _hybrid(config, (experts,) * whole(config, "num_hidden_layers"), _separate, _SECTIONS)


def _hybrid(
    config: Config,
    mlps: Sequence[FeedForwardSpec],
    projections: Callable[[GatedDeltaSpec], tuple[StoredModule, ...]],
    sections: Sequence[int] = (),
) -> DecoderSpec:
    """Return the spec with these feed-forwards.

    Args:
        projections: returns how the checkpoint stores a delta net's projections.
        sections: see `rope_spec`.
    """
    only(config, "hidden_act", "silu")
    only(config, "attention_bias", False)
    layers, period = whole(config, "num_hidden_layers"), whole(config, "full_attention_interval", 4)
    kinds = value_or(config, "layer_types", None) or [
        "full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(layers)
    ]
    delta = GatedDeltaSpec(
        key_heads=whole(config, "linear_num_key_heads", 16),
        key_dim=whole(config, "linear_key_head_dim", 128),
        heads=whole(config, "linear_num_value_heads", 32),
        head_dim=whole(config, "linear_value_head_dim", 128),
        taps=whole(config, "linear_conv_kernel_dim", 4),
    )
    head_dim, norm = whole(config, "head_dim", 256), rms_norm(config, offset=1.0)
    queries = StoredModule(f"{_ATTENTION}q_proj", (f"{_ATTENTION}q_proj", f"{_ATTENTION}gate_proj"), (head_dim,) * 2)
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        head_norms=HeadNorms(norm),
        rope=rope_spec(config, head_dim, rotated=0.25, sections=sections),
        mixers=layer_mixers(kinds, delta, SelfAttention(gated=True)),
        mlps=mlps,
        stored=StoredNames(modules=(queries, *projections(delta)), stacks=FUSED, foreign=("mtp.",)),
    )


def _experts(config: Config, count: int, top_k: int) -> ExpertsSpec:
    """Return experts with a gated shared one; `count` and `top_k` are the family's defaults."""
    shared = SharedSpec(whole(config, "shared_expert_intermediate_size", 512), "shared_expert", "shared_expert_gate")
    return experts_of(config, softmax_routing(config, top_k), "num_experts", "moe_intermediate_size", count, shared)


def _fused(delta: GatedDeltaSpec) -> tuple[StoredModule, ...]:
    """Return Qwen3-Next's fused projections: a run for each key head."""
    share = delta.heads // delta.key_heads
    values = share * delta.head_dim
    return (
        StoredModule(
            f"{_DELTA}in_proj_qkvz",
            tuple(f"{_DELTA}{name}_proj" for name in "qkvz"),
            (delta.key_dim, delta.key_dim, values, values),
        ),
        StoredModule(f"{_DELTA}in_proj_ba", (f"{_DELTA}b_proj", f"{_DELTA}a_proj"), (share, share)),
    )


def _separate(delta: GatedDeltaSpec) -> tuple[StoredModule, ...]:
    """Return Qwen3.5's projections: only queries, keys and values are fused."""
    keys, values = delta.key_heads * delta.key_dim, delta.heads * delta.head_dim
    qkv = tuple(f"{_DELTA}{name}_proj" for name in "qkv")
    others = {f"{_DELTA}in_proj_{name}": f"{_DELTA}{name}_proj" for name in "zba"}
    return StoredModule(f"{_DELTA}in_proj_qkv", qkv, (keys, keys, values)), *renamed(others)
