"""gpt-oss: attention sinks, and experts with a clamped gate."""

from __future__ import annotations

from octavo.models.feed_forwards.spec import ExpertsSpec
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import bias_set, decoder_spec, layer_types, rms_norm, sliding_windows
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import DecoderSpec, StoredNames, StoredStack, renamed
from octavo.nn.experts_spec import ClampedGate, RoutingSpec

_OWN, _EXPERT = "layers.{}.mlp.experts.", "layers.{}.mlp.experts.{}."
_STORED = StoredNames(
    modules=renamed({"layers.{}.mlp.router": "layers.{}.mlp.gate"}),
    stacks=tuple(
        StoredStack(f"{_OWN}{name}{end}", tuple(f"{_EXPERT}{part}.{kind}" for part in parts), True, len(parts) > 1)
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
        for end, kind in (("", "weight"), ("_bias", "bias"))
    ),
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: Config) -> DecoderSpec:
    """gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, a window on every other layer, experts with biases
    and a clamped gate."""
    only(config, "hidden_act", "silu")
    scaled = config.get("rope_parameters") or config.get("rope_scaling")
    head_dim = whole(config, "head_dim", 64)
    experts = ExpertsSpec(
        num_experts=whole(config, "num_local_experts", 128),
        size=whole(config, "intermediate_size"),
        routing=RoutingSpec(top_k=whole(config, "num_experts_per_tok", 4), scores="chosen", bias=True),
        clamped=ClampedGate(
            float(value_or(config, "swiglu_alpha", 1.702)), float(value_or(config, "swiglu_limit", 7.0))
        ),
        bias=True,
    )
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=rms_norm(config, default=1e-5),
        rope=rope_spec(config if scaled else {**config, "rope_scaling": _YARN}, head_dim, theta=150000.0),
        windows=sliding_windows(layer_types(config, 2), whole(config, "sliding_window", 128)),
        sinks=True,
        biases=bias_set(config, mlp="", default=True),
        mlp=experts,
        stored=_STORED,
    )
