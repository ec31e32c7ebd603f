"""Families that scale embeddings, residual sums, scores or logits by constants: Granite, MiniCPM and
HyperCLOVA X."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.errors import ModelFileError
from octavo.models.families.experts import experts_of, stacks
from octavo.models.families.mamba import layer_mixers, mamba2_of
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec, SharedSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import FULL, SLIDING, bias_set, decoder_spec, head_size, layer_types, sliding_windows
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import PRE, DecoderSpec, LayerNorms, Multipliers, StoredModule, StoredNames, renamed
from octavo.nn.experts_spec import RoutingSpec

_EXPERTS = "layers.{}.block_sparse_moe"
GRANITE_ROUTER = {f"{_EXPERTS}.{name}": "layers.{}.mlp.gate" for name in ("router.layer", "router")}
GRANITE_STACKS = (
    *stacks(f"{_EXPERTS}.experts"),
    *stacks(_EXPERTS, "input_linear.weight", "output_linear.weight"),
)
"""As transformers 5 keeps them, whose names adapters have, and as published."""


def granite(config: Config) -> DecoderSpec:
    """Granite 3, the dense sizes (https://github.com/ibm-granite/granite-3.0-language-models)."""
    scale = float(value_or(config, "attention_multiplier", 1.0))
    return decoder_spec(config, multipliers=_multipliers(config), scale=scale, biases=bias_set(config))


def hyperclova_x(config: Config) -> DecoderSpec:
    """HyperCLOVA X SEED (https://huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B): Granite's multipliers,
    but logits are multiplied; norms on both sides of each part."""
    spec = granite(config)
    norms = LayerNorms(after_mixer="post_norm1", after_mlp="post_norm2")
    return replace(
        spec,
        scale=float(value_or(config, "attention_multiplier", spec.head_dim**-0.5)),
        multipliers=replace(spec.multipliers, logits=float(value_or(config, "logits_scaling", 1.0))),
        norms=norms if value_or(config, "use_post_norm", True) else PRE,
    )


def granite_hybrid(config: Config) -> DecoderSpec:
    """Granite 4 (https://www.ibm.com/granite/docs/models/granite): Mamba-2 with some layers of attention, with or
    without experts."""
    head_dim, size = head_size(config), whole(config, "shared_intermediate_size", 1024)
    limit = whole(config, "max_position_embeddings", 2048)
    rotates = value_or(config, "position_embedding_type", "") == "rope"
    kinds = value_or(config, "layer_types", value_or(config, "layers_block_type", None))
    has_experts = int(value_or(config, "num_local_experts", 8)) > 0
    mlp = "layers.{}.mlp.shared_experts" if has_experts else "layers.{}.mlp"
    modules = (*renamed(GRANITE_ROUTER), *shared_modules(mlp, size))
    return decoder_spec(
        config,
        multipliers=_multipliers(config),
        scale=float(value_or(config, "attention_multiplier", 1.0)),
        biases=bias_set(config, mlp=""),
        rope=rope_spec(config, head_dim) if rotates else no_rope(head_dim, limit),
        mlp=granite_experts(config, SharedSpec(size)) if has_experts else MlpSpec(size),
        mixers=layer_mixers(kinds or ["mamba"] * whole(config, "num_hidden_layers"), mamba2_of(config, 1e-6)),
        stored=StoredNames(modules=modules, stacks=GRANITE_STACKS),
    )


def shared_modules(mlp: str, size: int) -> tuple[StoredModule, ...]:
    """Return the modules of a feed-forward that all tokens use.

    Args:
        mlp: the decoder's name of it.
        size: outputs of `up_proj`.
    """
    return (
        StoredModule("layers.{}.shared_mlp.input_linear", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (size, size)),
        StoredModule("layers.{}.shared_mlp.output_linear", (f"{mlp}.down_proj",)),
    )


def granite_swa(config: Config) -> DecoderSpec:
    """Granite with attention sinks, and a window on three of four layers
    (https://huggingface.co/ibm-granite/granite-swash-2b)."""
    spec = with_windows(config, granite({**config, "rms_norm_eps": value_or(config, "rms_norm_eps", 1e-5)}))
    return replace(spec, tied=bool(value_or(config, "tie_word_embeddings", True)))


def with_windows(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with sinks, windows and each layer's own base of rotations, where 0 means no rotary positions.

    Raises:
        ModelFileError: a list has the wrong length.
    """
    layers, dim = spec.num_layers, spec.head_dim
    types = layer_types(config, 0, [SLIDING if i % 4 else FULL for i in range(layers)])
    bases = value_or(config, "layer_rope_theta", [spec.rope.theta] * layers)
    if len(bases) != layers:
        raise ModelFileError(f"The model's config lists {len(bases)} values of layer_rope_theta for {layers} layers.")
    plain = no_rope(dim, spec.rope.max_position)
    return replace(
        spec,
        sinks=True,
        windows=tuple(sliding_windows(types, whole(config, "sliding_window", 128))),
        ropes=tuple(replace(spec.rope, theta=float(base)) if base else plain for base in bases),
    )


def granite_experts(config: Config, shared: SharedSpec | None = None) -> ExpertsSpec:
    """Return Granite's experts."""
    routing = RoutingSpec(top_k=whole(config, "num_experts_per_tok", 2), scores="chosen")
    return experts_of(config, routing, "num_local_experts", "intermediate_size", 8, shared)


def _multipliers(config: Config) -> Multipliers:
    return Multipliers(
        embedding=float(value_or(config, "embedding_multiplier", 1.0)),
        residual=float(value_or(config, "residual_multiplier", 1.0)),
        logits=1.0 / float(value_or(config, "logits_scaling", 1.0)),
    )


def minicpm(config: Config) -> DecoderSpec:
    """MiniCPM 1 and 2 (https://arxiv.org/abs/2404.06395)."""
    hidden, layers = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    multipliers = Multipliers(
        embedding=float(value_or(config, "scale_emb", 1.0)),
        residual=float(value_or(config, "scale_depth", 1.0)) / layers**0.5,
        logits=float(value_or(config, "dim_model_base", 1)) / hidden,
    )
    return decoder_spec(config, multipliers=multipliers, biases=bias_set(config, mlp=""), tied=True)
