"""Products of a few tokens with their experts on a GPU, one token at a time; of a single token, fused with its norm and
the residual sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import packed_experts
from octavo.nn.ops.expert_weights import PackedMatrices, StackedWeights, gate_arguments
from octavo.nn.ops.routing import Routing
from octavo.nn.ops.triton_expert_rows import down_row_kernel, gate_up_row_kernel
from octavo.nn.ops.triton_overlap import overlap

_MOST_HELD = 8192
"""Numbers of a token's experts, for each output, that registers hold."""


class RowPlan(NamedTuple):
    """How programs divide a product of single rows.

    Attributes:
        block_n: outputs of a program.
        block_k: inputs of a pass.
        held: a pass has all inputs, and the matrices of all experts are loaded before the wait for them.
    """

    block_n: int
    block_k: int
    warps: int
    held: bool = False


def mix_rows(
    x: Tensor,
    routing: Routing,
    stacked: StackedWeights,
    form: ExpertsForm,
    added: Tensor | None = None,
    plans: tuple[RowPlan, RowPlan] | None = None,
) -> Tensor:
    """See `mix_stacked` in `expert_products.py`; one program computes some outputs of one token.

    Args:
        plans: of the product before the gate and of the one behind it; None for the fastest.
    """
    before, behind = plans or row_plans(form, routing, x.device)
    inner = gate_rows(x, None, routing, stacked, form, before)
    return _sum_rows(inner, routing, stacked, form, behind, torch.empty_like(x), added)


def gate_rows(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    routing: Routing,
    stacked: StackedWeights,
    form: ExpertsForm,
    plan: RowPlan | None = None,
) -> Tensor:
    """Return activated products of each token with its experts: [T * top_k, size] for x [T, hidden_size] contiguous.

    Args:
        norm: weight [hidden_size] and epsilon of an RMS norm of x; None for none.
        plan: None for the fastest.
    """
    if isinstance(stacked.gate_up, PackedMatrices):
        return packed_experts.gate_rows(x, norm, routing, stacked.gate_up, stacked.gate_up_bias, stacked.begin, form)
    scale, eps = norm if norm is not None else (x, 0.0)
    plan = plan or row_plans(form, routing, x.device)[0]
    choices = routing.experts.numel()
    inner = torch.empty(choices, form.size, dtype=stacked.gate_up.dtype, device=x.device)
    alpha, limit, activation = gate_arguments(form)
    gate_up_row_kernel[(cdiv(form.size, plan.block_n), choices)](
        x,
        scale,
        stacked.gate_up,
        x if stacked.gate_up_bias is None else stacked.gate_up_bias,
        routing.weights,
        routing.experts,
        inner,
        stacked.begin,
        eps,
        alpha,
        limit,
        OWNED=len(stacked.down),
        TOP_K=routing.experts.shape[1],
        N=form.size,
        K=form.hidden_size,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        NORMED=norm is not None,
        GATED=form.gated,
        ACTIVATION=activation,
        BIASED=stacked.gate_up_bias is not None,
        WEIGHTED=form.on_inputs,
        num_warps=plan.warps,
        **overlap(x.device),
    )
    return inner


def add_rows(
    inner: Tensor,
    routing: Routing,
    stacked: StackedWeights,
    form: ExpertsForm,
    stream: Tensor,
    plan: RowPlan | None = None,
) -> None:
    """Add the sum of the experts' second products, of `inner` [T * top_k, size], to stream [T, hidden_size] in place,
    rounded once.

    Args:
        plan: of the product; None for the fastest.
    """
    plan = plan or row_plans(form, routing, inner.device)[1]
    _sum_rows(inner, routing, stacked, form, plan, stream, stream)


def _sum_rows(
    inner: Tensor,
    routing: Routing,
    stacked: StackedWeights,
    form: ExpertsForm,
    plan: RowPlan,
    out: Tensor,
    added: Tensor | None,
) -> Tensor:
    if isinstance(stacked.down, PackedMatrices):
        return packed_experts.sum_rows(inner, routing, stacked.down, stacked.down_bias, stacked.begin, form, out, added)
    down_row_kernel[(cdiv(form.hidden_size, plan.block_n), len(out))](
        inner,
        stacked.down,
        inner if stacked.down_bias is None else stacked.down_bias,
        routing.weights,
        routing.experts,
        inner if added is None else added,
        out,
        stacked.begin,
        OWNED=len(stacked.down),
        TOP_K=routing.experts.shape[1],
        N=form.hidden_size,
        K=form.size,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        BIASED=stacked.down_bias is not None,
        WEIGHTED=not form.on_inputs,
        ADDED=added is not None,
        HELD=plan.held,
        SLOTS=next_power_of_2(routing.experts.shape[1]),
        num_warps=plan.warps,
        **overlap(inner.device),
    )
    return out


def row_plans(form: ExpertsForm, routing: Routing, device: torch.device) -> tuple[RowPlan, RowPlan]:
    """Return the fastest division of both products of single rows, as measured on an H200."""
    tokens, top_k = routing.experts.shape
    inputs = next_power_of_2(form.size)
    # A held product reads `experts` before it waits: the kernels of the first product call `lead`.
    may_hold = tokens == 1
    if device.type != "cuda":
        return RowPlan(32, 64, 1), RowPlan(32, 64, 1, held=may_hold and inputs <= 64)
    before = RowPlan(1, 2048, 4) if form.hidden_size >= 2048 else RowPlan(2, 1024, 4)
    held = may_hold and inputs * next_power_of_2(top_k) <= _MOST_HELD
    return before, RowPlan(2, inputs if held else min(1024, inputs), 4, held)
