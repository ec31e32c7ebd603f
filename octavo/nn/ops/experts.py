"""Feed-forwards of the experts that tokens chose, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.nn.delta import ExpertsDelta
from octavo.nn.experts_spec import ClampedGate, ExpertsForm
from octavo.nn.ops.activation import ACTIVATIONS, act_mul
from octavo.nn.ops.routing import Routing

Expert = Callable[[int, Tensor], Tensor]
"""(expert among those of this rank, x [N, K]) -> y [N, M]: a product with one expert's matrix."""


def gate(gate_up: Tensor, form: ExpertsForm) -> Tensor:
    """Return act(gate) * up of [N, 2 * size], the gate in the first half, or act(up) of [N, size]: [N, size]."""
    if not form.gated:
        return ACTIVATIONS[form.activation](gate_up)
    return act_mul(gate_up, form.activation) if form.clamped is None else clamped_gate(gate_up, form.clamped)


def clamped_gate(gate_up: Tensor, clamped: ClampedGate) -> Tensor:
    """Return gpt-oss's gate of [N, 2 * size]: [N, size]."""
    first, second = gate_up.chunk(2, dim=-1)
    first = first.clamp(max=clamped.limit)
    return first * torch.sigmoid(first * clamped.alpha) * (second.clamp(-clamped.limit, clamped.limit) + 1)


def mix_reference(x: Tensor, routing: Routing, gate_up: Expert, down: Expert, form: ExpertsForm) -> Tensor:
    """Return each token's weighted sum of its experts, one token and expert at a time; for tests."""
    rows = []
    for token, weights, experts in zip(x, routing.weights.tolist(), routing.experts.tolist(), strict=True):
        y = torch.zeros_like(token, dtype=torch.float32)
        for weight, expert in zip(weights, experts, strict=True):
            if expert not in form.owned:
                continue
            given = token * weight if form.on_inputs else token
            own = expert - form.owned.start
            out = down(own, gate(gate_up(own, given[None]), form))[0]
            y += out.float() * (1.0 if form.on_inputs else weight)
        rows.append(y.to(x.dtype))
    return torch.stack(rows) if rows else torch.empty_like(x)


def mix(
    x: Tensor,
    routing: Routing,
    gate_up: Expert,
    down: Expert,
    form: ExpertsForm,
    delta: ExpertsDelta | None = None,
) -> Tensor:
    """Return each token's weighted sum of its experts: [T, hidden_size] for x [T, hidden_size].

    Choices of experts that this rank lacks add nothing. Every expert multiplies all of its tokens at once. A token's
    outputs are added in the order of its own experts, so the order of the sum does not depend on other tokens. Reads
    the number of tokens per expert on the host.

    Args:
        delta: additions to both products; None for none.
    """
    tokens, top_k = routing.experts.shape
    chosen = routing.experts.flatten()
    order = chosen.argsort(stable=True)
    out = (x.new_empty if form.own is None else x.new_zeros)(tokens * top_k, x.shape[1])
    parts = order.split(torch.bincount(chosen, minlength=form.num_experts).tolist())
    for own, expert in enumerate(form.owned):
        if len(part := parts[expert]):
            given = x[part // top_k]
            if form.on_inputs:
                given = given * routing.weights.flatten()[part, None].to(x.dtype)
            inner = gate_up(own, given)
            if delta is not None:
                delta.add_to(inner, given, expert, part // top_k, down=False)
            inner = gate(inner, form)
            outputs = down(own, inner)
            if delta is not None:
                delta.add_to(outputs, inner, expert, part // top_k, down=True)
            out[part] = outputs
    chosen_outputs: Tensor = out.unflatten(0, (tokens, top_k)).float()
    if not form.on_inputs:
        chosen_outputs = chosen_outputs * routing.weights[..., None]
    return chosen_outputs.sum(1).to(x.dtype)
