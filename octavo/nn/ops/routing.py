"""Choosing experts from a router's logits, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.nn.experts_spec import RoutingSpec


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        weights: [T, top_k] float32.
        experts: [T, top_k] int32.
        counts: on a GPU, how often each expert was chosen by some tokens each (`expert_products.py`); None if not
            counted.
    """

    weights: Tensor
    experts: Tensor
    counts: Tensor | None = None


def route(logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
    """Choose experts for each row of logits [T, num_experts].

    Args:
        correction: [num_experts] float32, added to the scores to choose experts.
    """
    logits = logits.float()
    if spec.scores == "mixer":
        return _mixed(logits, spec)
    if spec.scores == "chosen":
        best, experts = logits.topk(spec.top_k, dim=-1)
        return _finished(best.softmax(-1), experts, spec)
    scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    experts = _within_groups(choice, spec).topk(spec.top_k, dim=-1).indices
    return _finished(scores.gather(1, experts), experts, spec)


def _within_groups(choice: Tensor, spec: RoutingSpec) -> Tensor:
    """Return the scores with -inf for experts outside the best groups."""
    if spec.groups == 1:
        return choice
    grouped: Tensor = choice.unflatten(1, (spec.groups, -1))
    if spec.group_score == "max":
        best = grouped.amax(-1)
    else:
        best = grouped.topk(2, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(spec.top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)


def _finished(weights: Tensor, experts: Tensor, spec: RoutingSpec) -> Routing:
    if spec.normalized:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=spec.floor)
    return Routing(weights * spec.scaling if spec.scaling != 1.0 else weights, experts.int())


def _mixed(logits: Tensor, spec: RoutingSpec) -> Routing:
    """SparseMixer without noise: each expert's weight is its share among those near it that are not chosen yet."""
    left, weights, experts = logits, [], []
    for _ in range(spec.top_k):
        best, chosen = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * spec.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, chosen))
        experts.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    return _finished(torch.cat(weights, 1), torch.cat(experts, 1), spec)
