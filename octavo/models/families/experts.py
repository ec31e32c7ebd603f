"""Mixtures of experts in configurations and checkpoints: what several families share."""

from __future__ import annotations

from octavo.core.errors import ModelFileError
from octavo.models.feed_forwards.spec import ExpertsSpec, FeedForwardSpec, MlpSpec, SharedSpec
from octavo.models.hf_config import Config, value_or, whole
from octavo.models.hf_decoder import activation
from octavo.models.spec import StoredStack
from octavo.nn.experts_spec import RoutingSpec

_EXPERT = "layers.{}.mlp.experts.{}."
_GATE_UP = (f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight")


def stacks(place: str, gate_up: str = "gate_up_proj", down: str = "down_proj") -> tuple[StoredStack, ...]:
    """Return the experts of a layer in two tensors below `place`, by default named as transformers 5 keeps them."""
    return (
        StoredStack(f"{place}.{gate_up}", _GATE_UP),
        StoredStack(f"{place}.{down}", (f"{_EXPERT}down_proj.weight",)),
    )


def separate(place: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    """Return the names of experts that are stored one by one below `place`: the checkpoint's -> the decoder's."""
    names = {gate: "gate_proj", up: "up_proj", down: "down_proj"}
    return {f"{place}.{{}}.{theirs}": f"{_EXPERT}{ours}" for theirs, ours in names.items()}


FUSED = stacks("layers.{}.mlp.experts")
"""As transformers 5 keeps them in most families."""


def corrected_sigmoid(config: Config, top_k: int | None, *, normalized: bool) -> RoutingSpec:
    """Return DeepSeek V3's routing (https://arxiv.org/abs/2412.19437), from its fields.

    Args:
        top_k, normalized: the family's defaults; None for a field that must be there.
    """
    return RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", top_k),
        scores="sigmoid",
        corrected=True,
        groups=whole(config, "n_group", 1),
        top_groups=whole(config, "topk_group", 1),
        group_score="top2",
        normalized=bool(value_or(config, "norm_topk_prob", normalized)),
        scaling=float(value_or(config, "routed_scaling_factor", 1.0)),
    )


def softmax_routing(config: Config, top_k: int) -> RoutingSpec:
    normalized = bool(value_or(config, "norm_topk_prob", False))
    chosen = whole(config, "num_experts_per_tok", top_k)
    # A softmax divided by the sum of the chosen is the softmax of the chosen.
    return RoutingSpec(top_k=chosen, scores="chosen" if normalized else "softmax")


def experts_of(
    config: Config, routing: RoutingSpec, count: str, size: str, default: int | None, shared: SharedSpec | None = None
) -> ExpertsSpec:
    """Return a mixture, from the fields that name the number of experts and their size.

    Raises:
        ModelFileError: a field is missing, or a token would use more experts than it can choose from.
    """
    # transformers 5 writes both names of this number.
    names = (count, "num_local_experts", "num_experts", "n_routed_experts")
    stated = next((name for name in names if config.get(name) is not None), count)
    number = whole(config, stated, default)
    choices = number // routing.groups * routing.top_groups
    if number % routing.groups or routing.top_k > choices:
        groups = f" in n_group={routing.groups} groups, and a token uses topk_group={routing.top_groups} groups"
        raise ModelFileError(
            f"The model's config has {stated}={number}{groups if routing.groups > 1 else ''}: a token can't choose "
            f"{routing.top_k} of them. Groups have to be of equal size, and those used to have as many experts as a "
            "token uses."
        )
    return ExpertsSpec(
        num_experts=number,
        size=whole(config, size),
        routing=routing,
        activation=activation(config),
        shared=shared,
    )


def every_nth(config: Config, experts: ExpertsSpec) -> tuple[FeedForwardSpec, ...]:
    """Return Qwen's feed-forwards: experts in every n-th layer, except for listed ones."""
    step, dense = whole(config, "decoder_sparse_step", 1), set(value_or(config, "mlp_only_layers", []))
    plain = MlpSpec(whole(config, "intermediate_size"), experts.activation)
    layers = range(whole(config, "num_hidden_layers"))
    return tuple(plain if i in dense or (i + 1) % step else experts for i in layers)
