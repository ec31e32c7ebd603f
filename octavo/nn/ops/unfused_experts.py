"""Feed-forwards of experts with additions to their products, on a GPU: choices are sorted, and nothing is fused."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.delta import ExpertsDelta, SortedChoices
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops.expert_products import ExpertRows, multiply, sort, tilings_for
from octavo.nn.ops.expert_weights import Matrices, StackedWeights
from octavo.nn.ops.experts import gate
from octavo.nn.ops.routing import Routing


def mix_adding(x: Tensor, routing: Routing, stacked: StackedWeights, form: ExpertsForm, delta: ExpertsDelta) -> Tensor:
    """Return `mix_stacked` of x [T, hidden_size] with additions to both products of each choice.

    An addition comes before the activation, which kernels fuse with the first product. So both products are computed
    like the second one, whose kernels only multiply.
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    hidden, size = form.hidden_size, form.size
    before = _alone(stacked.gate_up, stacked.gate_up_bias, stacked.begin)
    behind = _alone(stacked.down, stacked.down_bias, stacked.begin)
    inner_size = 2 * size if form.gated else size
    before_form = ExpertsForm(num_experts=form.num_experts, hidden_size=inner_size, size=hidden)
    behind_form = ExpertsForm(num_experts=form.num_experts, hidden_size=hidden, size=size)
    top_k = routing.experts.shape[1]
    before_tiling = tilings_for(x, top_k, before, before_form)[1]
    behind_tiling = tilings_for(x, top_k, behind, behind_form)[1]
    height = min(before_tiling.height, behind_tiling.height)
    order, tiles = sort(routing, stacked, form, height)
    chosen = SortedChoices(order, tiles, height, top_k, stacked.begin)

    given = _rows_of(x, order, routing, form)
    inner = x.new_empty(len(order), inner_size)
    places = torch.arange(len(order), dtype=torch.int32, device=x.device)
    tiling = before_tiling._replace(height=height)
    multiply(given, before, before_form, routing, places, tiles, inner, tiling, first=False)
    delta.add_sorted(inner, given, chosen, down=False)
    inner = gate(inner, form)
    rows = x.new_empty(len(order), hidden)
    tiling = behind_tiling._replace(height=height)
    multiply(inner, behind, behind_form, routing, order, tiles, rows, tiling, first=False)
    delta.add_sorted(rows, inner, chosen, down=True)
    return ExpertRows(rows, routing, stacked.begin, len(stacked.down), form, None).total()


def _alone(matrices: Matrices, bias: Tensor | None, begin: int) -> StackedWeights:
    """Return one product's matrices as weights whose second product it is."""
    return StackedWeights(matrices, matrices, None, bias, begin)


def _rows_of(x: Tensor, order: Tensor, routing: Routing, form: ExpertsForm) -> Tensor:
    """Return the input of each sorted choice, [choices, hidden_size]. Places of other ranks' experts are arbitrary."""
    tokens, top_k = routing.experts.shape
    choice = order.clamp(0, tokens * top_k - 1)
    given = x[choice // top_k]
    return given * routing.weights.flatten()[choice, None].to(x.dtype) if form.on_inputs else given
