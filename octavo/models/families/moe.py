"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.families.experts import FUSED, corrected_sigmoid, every_nth, experts_of, separate, softmax_routing
from octavo.models.families.granite import (
    GRANITE_ROUTER,
    GRANITE_STACKS,
    granite,
    granite_experts,
    shared_modules,
    with_windows,
)
from octavo.models.families.llama import ernie
from octavo.models.families.mistral import mistral
from octavo.models.families.qwen3 import qwen3
from octavo.models.feed_forwards.spec import ExpertsSpec, FeedForwardSpec, MlpSpec, SharedSpec
from octavo.models.hf_config import Config, WithDefaults, only, value_or, whole
from octavo.models.hf_decoder import (
    FULL,
    SLIDING,
    bias_set,
    decoder_spec,
    head_size,
    layer_norm,
    layer_types,
    layer_windows,
    rms_norm,
    sliding_windows,
)
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.spec import POST, DecoderSpec, HeadNorms, StoredModule, StoredNames, StoredStack, renamed
from octavo.nn.experts_spec import RoutingSpec

_MIXTRAL = StoredNames(
    modules=renamed(
        {
            "layers.{}.block_sparse_moe.gate": "layers.{}.mlp.gate",
            **separate("layers.{}.block_sparse_moe.experts", "w1", "w3", "w2"),
        }
    ),
    stacks=FUSED,
)
_GRANITE = StoredNames(modules=renamed(GRANITE_ROUTER), stacks=GRANITE_STACKS)
PER_EXPERT = StoredNames(stacks=FUSED)
_OFFSETS = {"layers.{}.self_attn.softmax_offset": "layers.{}.self_attn.sinks"}
_MELLUM_BASES = {FULL: 500000.0, SLIDING: 10000.0}


def mixtral(config: Config) -> DecoderSpec:
    """Mixtral (https://arxiv.org/abs/2401.04088)."""
    routing = RoutingSpec(top_k=whole(config, "num_experts_per_tok", 2), scores="chosen")
    experts = experts_of(config, routing, "num_local_experts", "intermediate_size", 8)
    theta = rope_spec(config, head_size(config), theta=1000000.0)
    spec = mistral({**config, "sliding_window": value_or(config, "sliding_window", None)})
    return replace(spec, rope=theta, norm=rms_norm(config, default=1e-5), mlps=in_all(spec, experts), stored=_MIXTRAL)


def qwen2_moe(config: Config) -> DecoderSpec:
    """Qwen 1.5 and 2 with experts, and a gated shared expert (https://arxiv.org/abs/2407.10671)."""
    routing = softmax_routing(config, 4)
    shared = SharedSpec(whole(config, "shared_expert_intermediate_size", 5632), "shared_expert", "shared_expert_gate")
    experts = experts_of(config, routing, "num_experts", "moe_intermediate_size", 60, shared=shared)
    return decoder_spec(
        config,
        windows=layer_windows(config),
        mlps=every_nth(config, experts),
        biases=bias_set(config, qkv="qkv_bias", o="", mlp="", default=True),
        stored=PER_EXPERT,
    )


def qwen3_moe(config: Config) -> DecoderSpec:
    """Qwen3 with experts (https://arxiv.org/abs/2505.09388)."""
    experts = experts_of(config, softmax_routing(config, 8), "num_experts", "moe_intermediate_size", 128)
    # Unlike in the dense sizes, a window holds in all layers.
    windowed = {**config, "max_window_layers": 0}
    return replace(qwen3(windowed), mlps=every_nth(config, experts), stored=PER_EXPERT)


def qwen3_vl_moe(config: Config) -> DecoderSpec:
    """The text half of Qwen3-VL with experts (https://arxiv.org/abs/2511.21631), whose matrices are transposed in
    published files, and not in those that transformers writes."""
    inputs = whole(config, "hidden_size"), whole(config, "moe_intermediate_size", 768)
    stacks = tuple(replace(stack, inputs=size) for stack, size in zip(FUSED, inputs, strict=True))
    return replace(qwen3_moe(WithDefaults(config, norm_topk_prob=True)), stored=StoredNames(stacks=stacks))


def mellum(config: Config) -> DecoderSpec:
    """Mellum 2 (https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base): Qwen3's experts; layers with a window have a
    rotary base of their own."""
    head_dim, types = head_size(config, 128), layer_types(config, 0)
    normalized = WithDefaults(config, norm_topk_prob=True)
    experts = experts_of(config, softmax_routing(normalized, 8), "num_experts", "moe_intermediate_size", 64)
    given = value_or(config, "rope_parameters", {kind: {"rope_theta": base} for kind, base in _MELLUM_BASES.items()})
    ropes = {
        kind: rope_spec({**config, "rope_parameters": given}, head_dim, layer_type=kind) for kind in sorted(set(types))
    }
    norm = rms_norm(config)
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        head_norms=HeadNorms(norm),
        windows=sliding_windows(types, whole(config, "sliding_window", 1024)),
        rope=ropes[types[0]],
        ropes=tuple(ropes[kind] for kind in types),
        mlps=by_type(config, experts),
        biases=bias_set(config, mlp=""),
        stored=replace(PER_EXPERT, foreign=("mtp.",)),
    )


def flint(config: Config) -> DecoderSpec:
    """Flint (https://huggingface.co/RecursiveSI/flint): attention sinks; layers without a window have no rotary
    positions."""
    layers, head_dim = whole(config, "num_hidden_layers"), head_size(config, 128)
    full = [FULL if i < 2 or i % 4 == 1 or i == layers - 1 else SLIDING for i in range(layers)]
    types = layer_types(config, 0, full)
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 6),
        scores="sigmoid",
        normalized=bool(value_or(config, "norm_topk_prob", True)),
    )
    shared = SharedSpec(whole(config, "shared_expert_intermediate_size", 1024), "shared_expert")
    experts = experts_of(config, routing, "num_experts", "moe_intermediate_size", 256, shared)
    norm, rope = rms_norm(config), rope_spec(config, head_dim)
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        head_norms=HeadNorms(norm),
        windows=sliding_windows(types, whole(config, "sliding_window", 513)),
        rope=rope,
        ropes=tuple(rope if kind == SLIDING else no_rope(head_dim, rope.max_position) for kind in types),
        sinks=True,
        mlps=every_nth({**config, "mlp_only_layers": value_or(config, "mlp_only_layers", [0, 1])}, experts),
        biases=bias_set(config, mlp=""),
        stored=replace(PER_EXPERT, modules=renamed(_OFFSETS)),
    )


def olmoe(config: Config) -> DecoderSpec:
    """OLMoE: norms over all queries and all keys (https://arxiv.org/abs/2409.02060)."""
    only(config, "clip_qkv", None)  # the limit would be after the norms, unlike OLMo's
    experts = experts_of(config, softmax_routing(config, 8), "num_experts", "intermediate_size", 64)
    norm = rms_norm(config, default=1e-5)
    return decoder_spec(
        config,
        norm=norm,
        mlp=experts,
        head_norms=HeadNorms(norm, over="all"),
        biases=bias_set(config, mlp=""),
        stored=PER_EXPERT,
    )


def flex_olmo(config: Config) -> DecoderSpec:
    """FlexOlmo (https://arxiv.org/abs/2507.07024): OLMo 2 with experts that were trained apart."""
    experts = experts_of(config, softmax_routing(config, 5), "num_experts", "intermediate_size", 7)
    norm = rms_norm(config)
    return decoder_spec(
        config,
        norm=norm,
        norms=POST,
        rope=rope_spec(config, head_size(config), theta=500000.0),
        mlp=experts,
        head_norms=HeadNorms(norm, over="all"),
        biases=bias_set(config, mlp=""),
        stored=PER_EXPERT,
    )


def granite_moe(config: Config) -> DecoderSpec:
    """Granite 3 with experts (https://github.com/ibm-granite/granite-3.0-language-models)."""
    spec = granite(config)
    return replace(spec, mlps=in_all(spec, granite_experts(config)), stored=_GRANITE)


def granite_moe_shared(config: Config) -> DecoderSpec:
    """Granite with experts, and a feed-forward that all tokens use (https://huggingface.co/ibm-granite)."""
    spec, size = granite(config), int(value_or(config, "shared_intermediate_size", 0))
    experts = granite_experts(config, SharedSpec(size) if size else None)
    shared = shared_modules("layers.{}.mlp.shared_experts", size) if size else ()
    stored = replace(_GRANITE, modules=(*_GRANITE.modules, *shared))
    return replace(spec, mlps=in_all(spec, experts), stored=stored)


def granite_moe_swa(config: Config) -> DecoderSpec:
    """Granite with experts, attention sinks, and a window on three of four layers
    (https://huggingface.co/ibm-granite/granite-swash-3b-a600m)."""
    return with_windows(config, granite_moe_shared(config))


def phi_moe(config: Config) -> DecoderSpec:
    """Phi-3.5-MoE: LayerNorm, and SparseMixer routing (https://arxiv.org/abs/2409.12136)."""
    only(config, "num_experts_per_tok", 2)
    routing = RoutingSpec(top_k=2, scores="mixer", jitter=float(value_or(config, "router_jitter_noise", 0.01)))
    head = {"head"} if config.get("lm_head_bias") else set()
    return decoder_spec(
        config,
        norm=layer_norm(config, "rms_norm_eps"),
        rope=rope_spec(_with_factor(config), head_size(config), theta=1000000.0),
        windows=[value_or(config, "sliding_window", None)] * whole(config, "num_hidden_layers"),
        mlp=experts_of(config, routing, "num_local_experts", "intermediate_size", 16),
        biases=bias_set(config, mlp="") | head,
        stored=replace(
            _MIXTRAL, modules=(*_MIXTRAL.modules, StoredModule("layers.{}.mlp.router", ("layers.{}.mlp.gate",)))
        ),
    )


def _with_factor(config: Config) -> Config:
    """Return the configuration with LongRoPE's factor under the name that other families have for it.

    Raises:
        ConfigError: short and long contexts have different factors.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    params = dict(value_or(config, field, {}))
    if "long_mscale" not in params:
        return config
    short, long = params.get("short_mscale"), params["long_mscale"]
    if short != long:
        raise ConfigError(
            f"The model's config has short_mscale={short} and long_mscale={long}; Octavo supports one value."
        )
    return {**config, field: {**params, "attention_factor": long}}


def glm4_moe(config: Config) -> DecoderSpec:
    """GLM-4.5 and 4.6 (https://arxiv.org/abs/2508.06471)."""
    norm = rms_norm(config, default=1e-5)
    head_dim = head_size(config)
    return decoder_spec(
        config,
        norm=norm,
        rope=rope_spec(config, head_dim, rotated=0.5),
        head_norms=HeadNorms(norm) if config.get("use_qk_norm") else None,
        mlps=after_dense(WithDefaults(config, n_shared_experts=1), corrected_sigmoid(config, 8, normalized=True), 1),
        biases=bias_set(config, o="", mlp=""),
        stored=PER_EXPERT,
    )


def solar_open(config: Config) -> DecoderSpec:
    """Solar Open (https://huggingface.co/upstage/Solar-Open-100B): GLM-4.5's kind of experts, in all layers."""
    only(config, "use_qk_norm", False)
    head_dim = head_size(config, 128)
    named = WithDefaults(config, n_shared_experts=1)
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=rms_norm(config, default=1e-5),
        rope=rope_spec(config, head_dim, theta=1000000.0),
        mlps=after_dense(named, corrected_sigmoid(config, 8, normalized=True), 0, 128),
        biases=bias_set(config, o="", mlp=""),
        stored=PER_EXPERT,
    )


def dots1(config: Config) -> DecoderSpec:
    """dots.llm1 (https://arxiv.org/abs/2506.05767)."""
    norm, layers = rms_norm(config), whole(config, "num_hidden_layers")
    windowed = {**config, "use_sliding_window": value_or(config, "sliding_window", None) is not None}
    return decoder_spec(
        config,
        norm=norm,
        windows=layer_windows({**windowed, "max_window_layers": value_or(config, "max_window_layers", layers)}),
        head_norms=HeadNorms(norm),
        mlps=after_dense(config, corrected_sigmoid(config, None, normalized=False), 0),
        biases=bias_set(config, mlp=""),
        stored=PER_EXPERT,
    )


def ernie_moe(config: Config) -> DecoderSpec:
    """ERNIE 4.5 with experts (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf)."""
    only(config, "use_bias", False)
    routing = RoutingSpec(
        top_k=whole(config, "moe_k", 6),
        corrected=True,
        normalized=True,
        floor=float(value_or(config, "moe_norm_min", 1e-12)),
    )
    size, count = whole(config, "moe_intermediate_size", 1536), int(value_or(config, "moe_num_shared_experts", 2))
    shared = SharedSpec(size * count) if count else None
    experts = experts_of(config, routing, "moe_num_experts", "moe_intermediate_size", 64, shared=shared)
    layers, dense = whole(config, "num_hidden_layers"), MlpSpec(whole(config, "intermediate_size"), experts.activation)
    first, interval = int(value_or(config, "moe_layer_start_index", 1)), whole(config, "moe_layer_interval", 1)
    last = int(value_or(config, "moe_layer_end_index", -1))
    last = layers - 1 if last == -1 else last
    sparse = [first <= i <= last and (i + 1) % interval == 0 for i in range(layers)]
    # The correction has a first dimension of one, as if it were one expert's.
    correction = ("layers.{}.mlp.gate.e_score_correction_bias",)
    places = ("layers.{}.mlp.moe_statics", "layers.{}.mlp.gate.moe_statics")  # as published; in transformers 5
    corrections = (StoredStack(f"{place}.e_score_correction_bias", correction) for place in places)
    spec = ernie({"head_dim": whole(config, "hidden_size") // whole(config, "num_attention_heads"), **config})
    stored = StoredNames(stacks=(*FUSED, *corrections), foreign=("model.mtp_",))
    return replace(spec, mlps=tuple(experts if has else dense for has in sparse), stored=stored)


def in_all(spec: DecoderSpec, experts: ExpertsSpec) -> tuple[FeedForwardSpec, ...]:
    return (experts,) * spec.num_layers


def after_dense(
    config: Config, routing: RoutingSpec, dense: int, experts: int | None = None
) -> tuple[FeedForwardSpec, ...]:
    """Return DeepSeek's feed-forwards: some dense layers, then experts and a shared one, in every n-th layer; or those
    that `mlp_layer_types` lists.

    Args:
        dense, experts: the family's numbers of dense layers in front, and of experts; None for a field that must be
            there.

    Raises:
        ModelFileError: the list has the wrong length.
        ConfigError: it has an unknown type.
    """
    size, shared = whole(config, "moe_intermediate_size"), int(value_or(config, "n_shared_experts", 0))
    mixture = experts_of(
        config,
        routing,
        "n_routed_experts",
        "moe_intermediate_size",
        experts,
        shared=SharedSpec(size * shared) if shared else None,
    )
    first, step = int(value_or(config, "first_k_dense_replace", dense)), whole(config, "moe_layer_freq", 1)
    return by_type(config, mixture, [i >= first and i % step == 0 for i in range(whole(config, "num_hidden_layers"))])


def by_type(config: Config, experts: ExpertsSpec, sparse: Sequence[bool] = ()) -> tuple[FeedForwardSpec, ...]:
    """Return dense feed-forwards and experts where `mlp_layer_types` lists them.

    Args:
        sparse: which layers have experts if there is no such list; empty for all.

    Raises:
        ModelFileError: the list has the wrong length.
        ConfigError: it has an unknown type.
    """
    layers, types = whole(config, "num_hidden_layers"), config.get("mlp_layer_types")
    chosen = list(sparse or [True] * layers) if types is None else _sparse(types, layers)
    if all(chosen):
        return (experts,) * layers
    plain = MlpSpec(whole(config, "intermediate_size"), experts.activation)
    return tuple(experts if has else plain for has in chosen)


def _sparse(types: Sequence[str], layers: int) -> list[bool]:
    """Return which layers have experts, by `mlp_layer_types`."""
    if len(types) != layers:
        raise ModelFileError(f"The model's config lists {len(types)} mlp_layer_types for {layers} layers.")
    if unknown := sorted(set(types) - {"sparse", "dense"}):
        raise ConfigError(
            f"The model's config has mlp_layer_types {', '.join(unknown)}; Octavo supports dense and sparse."
        )
    return [kind == "sparse" for kind in types]
