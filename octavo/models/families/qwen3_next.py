"""Qwen3-Next: gated delta nets, with a layer of gated attention after every few."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.families.experts import FUSED, every_nth, experts_of, softmax_routing
from octavo.models.families.mamba import layer_mixers
from octavo.models.feed_forwards.spec import FeedForwardSpec, SharedSpec
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import decoder_spec, mlp_spec, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.mixers.spec import GatedDeltaSpec, SelfAttention
from octavo.models.spec import DecoderSpec, HeadNorms, StoredModule, StoredNames


def qwen3_next(config: Config) -> DecoderSpec:
    """Qwen3-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): gated delta nets and attention, experts."""
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
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        head_norms=HeadNorms(norm),
        rope=rope_spec(config, head_dim, rotated=0.25),
        mixers=layer_mixers(kinds, delta, SelfAttention(gated=True)),
        mlps=_feed_forwards(config, layers),
        stored=StoredNames(modules=_modules(delta, head_dim), stacks=FUSED, foreign=("mtp.",)),
    )


def _feed_forwards(config: Config, layers: int) -> Sequence[FeedForwardSpec]:
    """Return Qwen's feed-forwards, with a gated shared expert, if there are experts at all."""
    if not value_or(config, "num_experts", 512):
        return [mlp_spec(config, "silu")] * layers
    routing = softmax_routing({**config, "norm_topk_prob": value_or(config, "norm_topk_prob", True)}, 10)
    shared = SharedSpec(whole(config, "shared_expert_intermediate_size", 512), "shared_expert", "shared_expert_gate")
    return every_nth(config, experts_of(config, routing, "num_experts", "moe_intermediate_size", 512, shared))


def _modules(delta: GatedDeltaSpec, head_dim: int) -> tuple[StoredModule, ...]:
    """Return the fused projections: queries and gates by head, and the delta net's by key head."""
    share, own = delta.heads // delta.key_heads, "layers.{}.linear_attn."
    values = share * delta.head_dim
    return (
        StoredModule(
            "layers.{}.self_attn.q_proj",
            ("layers.{}.self_attn.q_proj", "layers.{}.self_attn.gate_proj"),
            (head_dim, head_dim),
        ),
        StoredModule(
            f"{own}in_proj_qkvz",
            tuple(f"{own}{name}_proj" for name in "qkvz"),
            (delta.key_dim, delta.key_dim, values, values),
        ),
        StoredModule(f"{own}in_proj_ba", (f"{own}b_proj", f"{own}a_proj"), (share, share)),
    )
