"""Families with state spaces: Mamba, Mamba-2, and hybrids of them with attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.families.experts import corrected_sigmoid, experts_of, separate, stacks
from octavo.models.feed_forwards.spec import ExpertsSpec, FeedForwardSpec, MlpSpec, SharedSpec
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import activation, bias_set, decoder_spec, head_size, mlp_spec, rms_norm
from octavo.models.hf_rope import no_rope, rope_spec
from octavo.models.mixers.spec import ATTENTION, Mamba2Spec, MambaSpec, MixerSpec
from octavo.models.spec import DecoderSpec, LayerNorms, NormSpec, StoredNames, StoredStack, renamed
from octavo.nn.experts_spec import RoutingSpec

_UNLIMITED = 32768
"""Tokens of a sequence of a model without a limit, if --max-model-len does not say otherwise."""

_STATE_SPACE = ("", ".in_proj", ".conv1d", ".x_proj", ".dt_proj", ".norm", ".out_proj")
_BACKBONE = {"embeddings": "embed_tokens", "norm_f": "norm"}
_FEED_FORWARD = {
    "layers.{}.pre_ff_layernorm": "layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.router": "layers.{}.mlp.gate",
    "final_layernorm": "norm",
    **separate("layers.{}.feed_forward.experts"),
    **{f"layers.{{}}.feed_forward.{name}": f"layers.{{}}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}


def _mixer_names() -> Mapping[str, str]:
    """Return the names of state spaces whose module is a layer's `mixer`."""
    return {f"layers.{{}}.mixer{part}": f"layers.{{}}.mamba{part}" for part in _STATE_SPACE}


def _recurrent(config: Config, mixer: MixerSpec, *, tied: bool) -> DecoderSpec:
    """Return the spec of a model whose layers have a state space and nothing else."""
    layers = whole(config, "num_hidden_layers")
    only(config, "hidden_act", "silu")
    return DecoderSpec(
        hidden_size=whole(config, "hidden_size"),
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=whole(config, "vocab_size"),
        mlps=(None,) * layers,
        mixers=(mixer,) * layers,
        norm=NormSpec(float(value_or(config, "layer_norm_epsilon", 1e-5))),
        norms=LayerNorms("norm"),
        rope=no_rope(16, whole(config, "max_position_embeddings", _UNLIMITED)),
        windows=(None,) * layers,
        tied=bool(value_or(config, "tie_word_embeddings", tied)),
        stored=StoredNames("backbone", renamed({**_BACKBONE, **_mixer_names()})),
    )


def mamba(config: Config) -> DecoderSpec:
    """Mamba (https://arxiv.org/abs/2312.00752)."""
    return _recurrent(config, _mamba(config), tied=True)


def falcon_mamba(config: Config) -> DecoderSpec:
    """Falcon-Mamba (https://arxiv.org/abs/2410.05355): Mamba with norms of step sizes, inputs and outputs."""
    eps = float(value_or(config, "mixer_rms_eps", 1e-6))
    return _recurrent(config, _mamba(config, norm_eps=eps, norm_scaled=False), tied=True)


def _mamba(config: Config, *, norm_eps: float | None = None, norm_scaled: bool = True) -> MambaSpec:
    hidden, rank = whole(config, "hidden_size"), value_or(config, "time_step_rank", "auto")
    return MambaSpec(
        inner=whole(config, "intermediate_size", int(value_or(config, "expand", 2) * hidden)),
        state=whole(config, "state_size", 16),
        rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
        taps=whole(config, "conv_kernel", 4),
        conv_bias=bool(value_or(config, "use_conv_bias", True)),
        bias=bool(value_or(config, "use_bias", False)),
        norm_eps=norm_eps,
        norm_scaled=norm_scaled,
    )


def mamba2(config: Config) -> DecoderSpec:
    """Mamba-2 (https://arxiv.org/abs/2405.21060), and Codestral Mamba."""
    return _recurrent(config, _mamba2_mixer(config, "num_heads", "head_dim", "state_size"), tied=False)


def _mamba2_mixer(config: Config, heads: str, head_dim: str, state: str) -> Mamba2Spec:
    """Read the mixer; the arguments are names of fields."""
    return Mamba2Spec(
        heads=whole(config, heads, 128),
        head_dim=whole(config, head_dim, 64),
        state=whole(config, state, 128),
        groups=whole(config, "n_groups", 8),
        taps=whole(config, "conv_kernel", 4),
        conv_bias=bool(value_or(config, "use_conv_bias", True)),
        bias=bool(value_or(config, "use_bias", False)),
        limits=_limits(config),
        norm_eps=float(value_or(config, "layer_norm_epsilon", 1e-5)),
    )


def bamba(config: Config) -> DecoderSpec:
    """Bamba (https://huggingface.co/blog/bamba): Mamba-2 with some layers of attention."""
    indices = value_or(config, "attn_layer_indices", [])
    kinds = ["attention" if i in indices else "mamba" for i in range(whole(config, "num_hidden_layers"))]
    return decoder_spec(
        config,
        norm=rms_norm(config, default=1e-5),
        rope=rope_spec(config, head_size(config), rotated=0.5),
        mixers=layer_mixers(kinds, mamba2_of(config)),
        biases=bias_set(config),
        stored=StoredNames(modules=renamed(_FEED_FORWARD)),
    )


def mamba2_of(config: Config, eps: float = 1e-5) -> Mamba2Spec:
    """Return the state space of a hybrid model, from the fields whose names begin with "mamba".

    Args:
        eps: the family's default of `rms_norm_eps`.
    """
    inner = int(value_or(config, "mamba_expand", 2)) * whole(config, "hidden_size")
    heads, head_dim = whole(config, "mamba_n_heads", 128), value_or(config, "mamba_d_head", "auto")
    only(config, "hidden_act", "silu")
    return Mamba2Spec(
        heads=heads,
        head_dim=inner // heads if head_dim == "auto" else int(head_dim),
        state=whole(config, "mamba_d_state", 256),
        groups=whole(config, "mamba_n_groups", 1),
        taps=whole(config, "mamba_d_conv", 4),
        conv_bias=bool(value_or(config, "mamba_conv_bias", True)),
        bias=bool(value_or(config, "mamba_proj_bias", False)),
        limits=_limits(config),
        norm_eps=float(value_or(config, "rms_norm_eps", eps)),
    )


def layer_mixers(kinds: Sequence[str], recurrent: MixerSpec, attention: MixerSpec = ATTENTION) -> tuple[MixerSpec, ...]:
    """Return each layer's mixer, by its type in a configuration: attention or the recurrent one.

    Raises:
        ConfigError: another type.
    """
    mixers = {"attention": attention, "full_attention": attention} | dict.fromkeys(
        ("mamba", "linear_attention", "conv"), recurrent
    )
    unknown = sorted(set(kinds) - set(mixers))
    if unknown:
        raise ConfigError(
            f"The model's config has layers of type {', '.join(unknown)}; Octavo supports {', '.join(mixers)}."
        )
    return tuple(mixers[kind] for kind in kinds)


def jamba(config: Config) -> DecoderSpec:
    """Jamba (https://arxiv.org/abs/2403.19887): Mamba with some layers of attention, with experts and without."""
    only(config, "hidden_act", "silu")
    hidden, rank = whole(config, "hidden_size"), value_or(config, "mamba_dt_rank", "auto")
    period, offset = whole(config, "attn_layer_period", 8), int(value_or(config, "attn_layer_offset", 4))
    mixer = MambaSpec(
        inner=int(value_or(config, "mamba_expand", 2)) * hidden,
        state=whole(config, "mamba_d_state", 16),
        rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
        taps=whole(config, "mamba_d_conv", 4),
        conv_bias=bool(value_or(config, "mamba_conv_bias", True)),
        bias=bool(value_or(config, "mamba_proj_bias", False)),
        norm_eps=float(value_or(config, "rms_norm_eps", 1e-6)),
    )
    layers = whole(config, "num_hidden_layers")
    kinds = ["attention" if i % period == offset else "mamba" for i in range(layers)]
    return decoder_spec(
        config,
        rope=no_rope(head_size(config), whole(config, "max_position_embeddings", 262144)),
        mixers=layer_mixers(kinds, mixer),
        mlps=_jamba_feed_forwards(config, layers),
        stored=StoredNames(modules=renamed(_FEED_FORWARD), stacks=stacks("layers.{}.feed_forward.experts")),
    )


def _jamba_feed_forwards(config: Config, layers: int) -> Sequence[FeedForwardSpec]:
    """Return experts in every n-th layer, if there are any."""
    dense = mlp_spec(config, activation(config))
    if whole(config, "num_experts", 16) == 1:
        return [dense] * layers
    routing = RoutingSpec(top_k=whole(config, "num_experts_per_tok", 2))
    experts = experts_of(config, routing, "num_experts", "intermediate_size", 16)
    period, offset = whole(config, "expert_layer_period", 2), int(value_or(config, "expert_layer_offset", 1))
    return [experts if i % period == offset else dense for i in range(layers)]


_NEMOTRON_EXPERTS = {
    "layers.{}.mixer.gate": "layers.{}.mlp.gate",
    "layers.{}.mixer.shared_experts.up_proj": "layers.{}.mlp.shared_experts.up_proj",
    "layers.{}.mixer.shared_experts.down_proj": "layers.{}.mlp.shared_experts.down_proj",
    **separate("layers.{}.mixer.experts"),
}
_NEMOTRON_STACKS = tuple(
    StoredStack(f"layers.{{}}.mixer.experts.{name}", (f"layers.{{}}.mlp.experts.{{}}.{name}.weight",))
    for name in ("up_proj", "down_proj")
)
_NEMOTRON_TYPES = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(config: Config) -> DecoderSpec:
    """Nemotron-H (https://arxiv.org/abs/2504.03624) and Nemotron 3: each layer is one of Mamba-2, attention, a
    feed-forward and experts.

    Step sizes are limited by `time_step_limit`, as in the authors' code. `transformers` has `time_step_min` as the
    lower limit, but only for prompts.
    """
    kinds = value_or(config, "layers_block_type", value_or(config, "layer_types", None))
    if kinds is None:
        kinds = [_NEMOTRON_TYPES.get(mark, mark) for mark in value_or(config, "hybrid_override_pattern", "")]
    if len(kinds) == 0:
        raise ModelFileError("The model's config has neither layers_block_type nor hybrid_override_pattern.")
    mixer = _mamba2_mixer(config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    only(config, "mamba_hidden_act", "silu")
    act = activation(config, "mlp_hidden_act", "relu2")
    feed_forwards: dict[str, FeedForwardSpec] = {}
    if "mlp" in kinds:
        feed_forwards["mlp"] = MlpSpec(whole(config, "intermediate_size"), act, gated=False)
    if "moe" in kinds:
        feed_forwards["moe"] = _nemotron_experts(config, act)
    mixers = iter(layer_mixers([kind for kind in kinds if kind not in feed_forwards], mixer))
    projections = {f"layers.{{}}.mixer.{name}_proj": f"layers.{{}}.self_attn.{name}_proj" for name in "qkvo"}
    inner = {f"layers.{{}}.mixer.{name}_proj": f"layers.{{}}.mlp.{name}_proj" for name in ("up", "down")}
    biases = {"attention_bias": ("qkv", "o"), "mlp_bias": ("mlp",)}
    return decoder_spec(
        {**config, "num_hidden_layers": len(kinds)},
        norm=NormSpec(float(value_or(config, "layer_norm_epsilon", 1e-5))),
        norms=LayerNorms("norm", None, "norm"),
        rope=no_rope(head_size(config), whole(config, "max_position_embeddings")),
        mlps=[feed_forwards.get(kind) for kind in kinds],
        mixers=tuple(None if kind in feed_forwards else next(mixers) for kind in kinds),
        biases=frozenset(part for name, parts in biases.items() if config.get(name) for part in parts),
        stored=StoredNames(
            "backbone",
            renamed({**_BACKBONE, **_mixer_names(), **projections, **inner, **_NEMOTRON_EXPERTS}),
            stacks=_NEMOTRON_STACKS,
        ),
    )


def _nemotron_experts(config: Config, act: str) -> ExpertsSpec:
    only(config, "moe_latent_size", None)
    return ExpertsSpec(
        num_experts=whole(config, "n_routed_experts", 8),
        size=whole(config, "moe_intermediate_size", 7688),
        routing=corrected_sigmoid(config, 2, normalized=True),
        activation=act,
        gated=False,
        shared=SharedSpec(whole(config, "moe_shared_expert_intermediate_size", 7688)),
    )


def _limits(config: Config) -> tuple[float, float]:
    """Return the limits of step sizes. JSON has no infinity; `transformers` writes {"__float__": "Infinity"}."""
    limits = value_or(config, "time_step_limit", (0.0, math.inf))
    low, high = (float(limit["__float__"] if isinstance(limit, Mapping) else limit) for limit in limits)
    return low, high
