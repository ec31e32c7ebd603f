"""Llama 4: windows at multiples of their size, layers without rotary positions, and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.models.feed_forwards.spec import ExpertsSpec, FeedForwardSpec, MlpSpec, SharedSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import activation, bias_set, decoder_spec, rms_norm
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.mixers.spec import SelfAttention, Temperature
from octavo.models.spec import DecoderSpec, HeadNorms, StoredNames, StoredStack, renamed
from octavo.nn.experts_spec import RoutingSpec
from octavo.nn.rope_spec import YarnScaling

_THEIRS, _OURS = "layers.{}.feed_forward.", "layers.{}.mlp."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MODULES = {
    f"{_THEIRS}router": f"{_OURS}gate",
    **{f"{_THEIRS}{name}": f"{_OURS}{name}" for name in _PROJECTIONS},
    **{f"{_THEIRS}shared_expert.{name}": f"{_OURS}shared_expert.{name}" for name in _PROJECTIONS},
    **{f"{_THEIRS}experts.{{}}.{name}": f"{_OURS}experts.{{}}.{name}" for name in _PROJECTIONS},  # if quantized
}
_STACKS = tuple(
    StoredStack(f"{_THEIRS}experts.{name}", tuple(f"{_OURS}experts.{{}}.{part}.weight" for part in parts), True)
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
)
_TEXT = StoredNames(modules=renamed(_MODULES), stacks=_STACKS)
_CHUNKED, _FULL = "chunked_attention", "full_attention"


def llama4(config: Config) -> DecoderSpec:
    """Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/), its text half: attention in chunks, layers
    without rotary positions, experts."""
    layers, head_dim = whole(config, "num_hidden_layers"), whole(config, "head_dim", 128)
    rope = rope_spec(config, head_dim, theta=500000.0, interleaved=True)
    normed = bool(value_or(config, "use_qk_norm", True))
    if normed and isinstance(rope.scaling, YarnScaling):
        # The norms, which the model has after the rotation, undo the factor of cosines and sines.
        rope = replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    interval, chunk = whole(config, "no_rope_layer_interval", 4), config.get("attention_chunk_size", 8192)
    rotates = config.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    kinds = config.get("layer_types") or [_CHUNKED if has else _FULL for has in rotates]
    norm = rms_norm(config, default=1e-5)
    rotated, still = SelfAttention(), SelfAttention(normed=False, temperature=_temperature(config))
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        # After an unscaled norm of a head, its rotation is the same as before one.
        head_norms=HeadNorms(rms_norm(config, default=1e-5, scaled=False)) if normed else None,
        rope=rope,
        ropes=tuple(rope if has else no_rope(head_dim, rope.max_position) for has in rotates),
        mixers=tuple(rotated if has else still for has in rotates),
        windows=[chunk if kind == _CHUNKED else None for kind in kinds],
        chunked=True,
        mlps=_feed_forwards(config, layers),
        biases=bias_set(config, mlp=""),
        stored=_TEXT,
    )


def _temperature(config: Config) -> Temperature | None:
    if not value_or(config, "attn_temperature_tuning", True):
        return None
    return Temperature(whole(config, "floor_scale", 8192), float(value_or(config, "attn_scale", 0.1)))


def _feed_forwards(config: Config, layers: int) -> Sequence[FeedForwardSpec]:
    """Return dense layers of their own size, with experts in every n-th."""
    act, size, step = activation(config), whole(config, "intermediate_size"), config.get("interleave_moe_layer_step", 1)
    sparse = value_or(config, "moe_layers", range(step - 1, layers, step) if step else ())
    experts = ExpertsSpec(
        num_experts=whole(config, "num_local_experts", 16),
        size=size,
        routing=RoutingSpec(top_k=whole(config, "num_experts_per_tok", 1), scores="sigmoid", on_inputs=True),
        activation=act,
        shared=SharedSpec(size, "shared_expert"),
    )
    dense = MlpSpec(whole(config, "intermediate_size_mlp", 16384), act)
    return [experts if i in sparse else dense for i in range(layers)]
