"""Gemma 4, the text models: larger heads and fewer key-value heads in layers without a window, norms of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.core.errors import ModelFileError
from octavo.models.families.experts import experts_of, stacks
from octavo.models.feed_forwards.spec import BesideSpec, FeedForwardSpec, MlpSpec
from octavo.models.hf_config import Config, WithDefaults, only, value_or, whole
from octavo.models.hf_decoder import FULL, activation, bias_set, decoder_spec, layer_types, rms_norm, sliding_windows
from octavo.models.hf_rope import local_rope, proportional_rope
from octavo.models.mixers.spec import SelfAttention, SharedSelfAttention
from octavo.models.spec import (
    SANDWICH,
    DecoderSpec,
    HeadNorms,
    LayerInputSpec,
    Multipliers,
    NormSpec,
    StoredModule,
    StoredNames,
    renamed,
)
from octavo.nn.experts_spec import RoutingSpec

UNIFIED = {"hidden_size_per_layer_input": 0, "sliding_window": 1024}
_ATTENTION = "layers.{}.self_attn"
_BESIDE = {
    "layers.{}.post_feedforward_layernorm_1": "layers.{}.mlp.mlp_norm",
    "layers.{}.pre_feedforward_layernorm_2": "layers.{}.mlp.experts_norm",
    "layers.{}.post_feedforward_layernorm_2": "layers.{}.mlp.mixed_norm",
    "layers.{}.router.proj": "layers.{}.mlp.gate",
    "layers.{}.router.scale": "layers.{}.mlp.gate.norm.scale",
    "layers.{}.router.per_expert_scale": "layers.{}.mlp.gate.expert_scale",
}
"""Names of the parts beside a dense feed-forward."""


def gemma4(config: Config) -> DecoderSpec:
    """Gemma 4: larger heads where no window is, norms of values, scaled layers (https://ai.google.dev/gemma/docs/core)."""
    if config.get("use_bidirectional_attention") != "vision":  # of images only, whose text half this is
        only(config, "use_bidirectional_attention", None)
    types = _types(config)
    norm = rms_norm(config)
    local = whole(config, "head_dim", 256)
    heads, head_dim = _global_heads(config)
    everywhere = proportional_rope(config, head_dim)
    windowed = local_rope(config, local, "rope_local_base_freq", everywhere.max_position)
    return decoder_spec(
        config,
        head_dim=local,
        norm=norm,
        norms=SANDWICH,
        windows=sliding_windows(types, whole(config, "sliding_window", 512)),
        rope=everywhere,
        ropes=tuple(everywhere if kind == FULL else windowed for kind in types),
        mixers=_mixers(config, types, SelfAttention(kv_heads=heads, head_dim=head_dim)),
        head_norms=HeadNorms(norm, values=NormSpec(norm.eps, scaled=False)),
        scale=1.0,
        mlps=_mlps(config),
        multipliers=Multipliers(embedding=whole(config, "hidden_size") ** 0.5),
        layer_inputs=_layer_inputs(config),
        layer_scales=True,
        logit_cap=config.get("final_logit_softcapping"),
        biases=bias_set(config, mlp=""),
        tied=True,
        stored=StoredNames(
            modules=(*renamed(_BESIDE), *_values_of_keys(config, types)),
            ignored=_unused(config),
            stacks=stacks("layers.{}.experts"),
        ),
    )


def _types(config: Config) -> list[str]:
    """Return each layer's type. The last one has full attention, whatever the configuration says."""
    return [*layer_types(config, 6)[:-1], FULL]


def _global_heads(config: Config) -> tuple[int, int]:
    """Return the key-value heads of layers with full attention, 0 for as many as in others, and their channels."""
    stated = value_or(config, "per_layer_config", {})
    if stated:
        return _stated_heads(config, stated)
    heads = whole(config, "num_global_key_value_heads", 1) if config.get("num_global_key_value_heads") else 0
    return heads if _shares_values(config) else 0, whole(config, "global_head_dim", 512)


def _stated_heads(config: Config, stated: Config) -> tuple[int, int]:
    """Return the same from the fields of single layers, as transformers 5 writes them.

    Raises:
        ModelFileError: layers of one type differ.
    """
    known, of_layers = {"head_dim", "num_key_value_heads"}, {}
    for number, fields in stated.items():
        if unknown := sorted(set(fields) - known):
            raise ModelFileError(
                f"The model's config has per_layer_config with {unknown[0]!r}, which is not supported."
            )
        of_layers[int(number)] = fields
    full = [of_layers.pop(i, {}) for i, kind in enumerate(_types(config)) if kind == FULL]
    if any(of_layers.values()) or any(fields != full[0] for fields in full):
        raise ModelFileError(
            "The model's config has a per_layer_config in which layers of one type differ; Octavo supports one for all "
            "layers with full attention."
        )
    heads = whole(full[0], "num_key_value_heads", 1) if full[0].get("num_key_value_heads") else 0
    return heads, whole(full[0], "head_dim", whole(config, "head_dim", 256))


def _num_shared(config: Config) -> int:
    """Return how many layers, the last ones, read keys and values of earlier ones."""
    return whole(config, "num_kv_shared_layers") if config.get("num_kv_shared_layers") else 0


def _unused(config: Config) -> tuple[str, ...]:
    """Return ends of names of tensors that checkpoints may have for layers without keys and values of their own."""
    layers = whole(config, "num_hidden_layers")
    parts = ("k_proj", "v_proj", "k_norm")
    shared = range(layers - _num_shared(config), layers)
    return tuple(f".{_ATTENTION.format(i)}.{part}.weight" for i in shared for part in parts)


def _mixers(config: Config, types: list[str], apart: SelfAttention) -> tuple[SelfAttention, ...]:
    """Return each layer's attention; `apart` is that of layers with full attention.

    Raises:
        ModelFileError: no layer of a type has keys and values for others of its type.
    """
    first = len(types) - _num_shared(config)
    own = [apart if kind == FULL else SelfAttention() for kind in types]
    sources = {kind: i for i, kind in enumerate(types[: max(first, 0)])}
    if missing := sorted(set(types[max(first, 0) :]) - sources.keys()):
        raise ModelFileError(
            f"The model's config has num_kv_shared_layers={len(types) - first} of {len(types)} layers, and none of "
            f"those before them is of type {missing[0]!r}, as some that share are."
        )
    shared = (
        SharedSelfAttention(kv_heads=one.kv_heads, head_dim=one.head_dim, source=sources[kind])
        for one, kind in zip(own[first:], types[first:], strict=True)
    )
    return (*own[:first], *shared)


def _layer_inputs(config: Config) -> LayerInputSpec | None:
    stated = config.get("hidden_size_per_layer_input", 256)
    if not stated:
        return None
    size = whole(config, "hidden_size_per_layer_input", 256)
    rows = whole(config, "vocab_size_per_layer_input", 262144)
    return LayerInputSpec(size, rows, activation(config, "hidden_activation", "gelu_pytorch_tanh"))


def _shares_values(config: Config) -> bool:
    return bool(value_or(config, "attention_k_eq_v", False))


def _values_of_keys(config: Config, types: list[str]) -> list[StoredModule]:
    """Return where layers find their values, if those of layers with full attention are the projected keys."""
    if not _shares_values(config):
        return []
    places = [_ATTENTION.format(i) for i, kind in enumerate(types) if kind == FULL]
    return [StoredModule(f"{place}.k_proj", (f"{place}.k_proj", f"{place}.v_proj")) for place in places]


def _mlps(config: Config) -> Sequence[FeedForwardSpec]:
    act = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    dense = MlpSpec(whole(config, "intermediate_size"), act)
    layers = whole(config, "num_hidden_layers")
    if not value_or(config, "enable_moe_block", False):
        shared = _num_shared(config)
        wide = replace(dense, size=2 * dense.size) if value_or(config, "use_double_wide_mlp", False) else dense
        return [dense] * (layers - shared) + [wide] * shared
    only(config, "use_double_wide_mlp", False)
    routing = RoutingSpec(top_k=whole(config, "top_k_experts"), scores="chosen", scaled=True)
    experts = experts_of(config, routing, "num_experts", "moe_intermediate_size", None)
    return [BesideSpec(mlp=dense, experts=replace(experts, activation=act), eps=rms_norm(config).eps)] * layers


def gemma4_unified(config: Config) -> DecoderSpec:
    """Gemma 4 12B, the text half, whose configuration has other defaults."""
    return gemma4(WithDefaults(config, **UNIFIED))
