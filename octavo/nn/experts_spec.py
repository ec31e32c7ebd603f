"""Parameters of mixtures of experts: choosing experts, and their feed-forwards. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """How a token chooses experts, and their weights in the sum, from the router's logits [num_experts].

    Attributes:
        top_k: experts of a token.
        scores: "softmax" and "sigmoid" are those of all logits; "chosen" is the softmax of the chosen experts' logits;
            "mixer" is SparseMixer's (https://arxiv.org/abs/2409.12136), for two experts.
        corrected: a learned bias per expert is added to the scores to choose experts, not to weigh them
            (https://arxiv.org/abs/2408.15664).
        groups, top_groups: only experts of the best groups are chosen; groups are of equal size, adjacent experts.
        group_score: a group's score is the largest of its experts' scores, or the sum of the largest two.
        normalized: divide the weights by their sum, or by `floor` if that is larger.
        scaling: factor of the weights.
        jitter: SparseMixer's: logits that are smaller than the largest by twice this fraction count as -inf.
        on_inputs: the weights multiply the experts' inputs, not their outputs.
        bias: the router has a bias.
        scaled: a learned factor per expert multiplies its weight last.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "chosen", "mixer"] = "softmax"
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    normalized: bool = False
    floor: float = 1e-20
    scaling: float = 1.0
    jitter: float = 0.0
    on_inputs: bool = False
    bias: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: min(g, limit) * sigmoid(alpha * min(g, limit)) * (clamp(u, -limit, limit) + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """The products of a layer's experts: down(act(gate(x)) * up(x)), or down(act(up(x))).

    Attributes:
        size: outputs of `gate` and `up` of one expert on this rank.
        activation: a name of `nn/ops/activation.py`.
        gated: there are gates.
        clamped: replaces the activation; None for none.
        bias: all products have biases.
        on_inputs: see `RoutingSpec`.
        own: the experts whose weights this rank has; None for all.
    """

    num_experts: int
    hidden_size: int
    size: int
    activation: str = "silu"
    gated: bool = True
    clamped: ClampedGate | None = None
    bias: bool = False
    on_inputs: bool = False
    own: range | None = None

    @property
    def owned(self) -> range:
        """The experts whose weights this rank has."""
        return range(self.num_experts) if self.own is None else self.own
