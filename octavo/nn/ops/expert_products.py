"""Products of experts on a GPU: the host's side of the kernels that route, sort, multiply and sum.

No result passes through the host, so all of it can be recorded in graphs. Few tokens are multiplied one by one
(`triton_expert_rows.py`); more are sorted by expert and multiplied in tiles (`triton_experts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.ops.routing import Routing, route
from octavo.nn.ops.triton_expert_rows import down_row_kernel, gate_up_row_kernel
from octavo.nn.ops.triton_experts import grouped_kernel, sum_kernel
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.ops.triton_routing import count_kernel, route_kernel, sort_kernel

_FEW = 4
"""Most tokens that are multiplied one by one; of more, several choose the same experts."""
_HEIGHTS = {8: 16, 24: 32}
"""Mean number of an expert's rows -> height of tiles that holds the rows of almost all experts."""
_MOST_TURNED = 48
_MANY = 512
"""Tokens from which on programs that route take more of them, so that fewer counts are added up."""


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """The weights of a layer's experts, or of some of them.

    Attributes:
        gate_up: [E, 2 * size, hidden_size] contiguous: each expert's gate, then its operand.
        down: [E, hidden_size, size] contiguous, of the same dtype.
        gate_up_bias, down_bias: [E, 2 * size] and [E, hidden_size]; None for none.
        begin: the first of these experts; choices of others count as 0.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    begin: int = 0


class RowPlan(NamedTuple):
    """How programs divide a product of single rows: outputs of a program, and inputs of a pass."""

    block_n: int
    block_k: int
    warps: int


class Tiling(NamedTuple):
    """How programs divide a product.

    Attributes:
        height, width, depth: choices, outputs (of gate and operand each) and inputs of a tile.
        side_by_side, turned, copies, copies_rows: see `grouped_kernel`.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int
    side_by_side: int = 1
    turned: bool = False
    copies: bool = True
    copies_rows: bool = False


def route_on_device(logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
    """See `route`; choices are counted, too, as `mix_stacked` needs it. logits [T, num_experts] contiguous."""
    if spec.scores == "mixer" or not logits.shape[0]:
        return route(logits, spec, correction)
    tokens, count = logits.shape
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=logits.device)
    counts = _empty_counts(tokens, count, logits.device)
    rows = _chunk(tokens)
    route_kernel[(counts.shape[0],)](
        logits,
        logits if correction is None else correction,
        weights,
        experts,
        counts,
        tokens,
        float(spec.scaling),
        float(spec.floor),
        E=count,
        COLUMNS=counts.shape[1],
        K=spec.top_k,
        SLOTS=triton.next_power_of_2(spec.top_k),
        ROWS=rows,
        SCORES=spec.scores,
        CORRECTED=correction is not None,
        GROUPS=spec.groups,
        GROUPS_PADDED=triton.next_power_of_2(spec.groups),
        TOP_GROUPS=spec.top_groups,
        SUMS_TWO=spec.group_score == "top2",
        NORMALIZED=spec.normalized,
        num_warps=4 if rows * counts.shape[1] <= 2048 else 8,
        **overlap(logits.device),
    )
    return Routing(weights, experts, counts)


def mix_stacked(
    x: Tensor, routing: Routing, stacked: StackedWeights, form: ExpertsForm, added: Tensor | None = None
) -> Tensor:
    """Return each token's weighted sum of its experts, plus `added`; in float32 between products and at the end.

    The sum of a token is in the order of its own choices. Choices of experts that are not in `stacked` add nothing.

    Args:
        x: [T, hidden_size] contiguous, of the weights' dtype.
        form: of all experts that tokens choose from.
        added: [T, hidden_size] contiguous.

    Returns:
        [T, hidden_size], a new tensor of x's dtype.
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    if x.shape[0] <= _FEW:
        return mix_rows(x, routing, stacked, form, added)
    tilings = tilings_for(x, routing.experts.shape[1], stacked, form)
    return mix_tiles(x, routing, stacked, form, tilings, added)


def mix_rows(
    x: Tensor,
    routing: Routing,
    stacked: StackedWeights,
    form: ExpertsForm,
    added: Tensor | None = None,
    plans: tuple[RowPlan, RowPlan] | None = None,
) -> Tensor:
    """`mix_stacked` with one program per token and some outputs.

    Args:
        plans: of the product before the gate and of the one behind it; None for the fastest.
    """
    tokens, hidden = x.shape
    top_k = routing.experts.shape[1]
    choices = tokens * top_k
    inner = x.new_empty(choices, form.size)
    out = torch.empty_like(x)
    alpha, limit, activation = _gate(form)
    plans = plans or row_plans(x, form)
    plan = plans[0]
    common: dict[str, Any] = {"OWNED": len(stacked.down), "TOP_K": top_k, "BIASED": form.bias, **overlap(x.device)}
    gate_up_row_kernel[(triton.cdiv(form.size, plan.block_n), choices)](
        x,
        stacked.gate_up,
        x if stacked.gate_up_bias is None else stacked.gate_up_bias,
        routing.weights,
        routing.experts,
        inner,
        stacked.begin,
        alpha,
        limit,
        N=form.size,
        K=hidden,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        ACTIVATION=activation,
        WEIGHTED=form.on_inputs,
        num_warps=plan.warps,
        **common,
    )
    plan = plans[1]
    common["BIASED"] = stacked.down_bias is not None
    down_row_kernel[(triton.cdiv(hidden, plan.block_n), tokens)](
        inner,
        stacked.down,
        x if stacked.down_bias is None else stacked.down_bias,
        routing.weights,
        routing.experts,
        x if added is None else added,
        out,
        stacked.begin,
        N=hidden,
        K=form.size,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        WEIGHTED=not form.on_inputs,
        ADDED=added is not None,
        num_warps=plan.warps,
        **common,
    )
    return out


def mix_tiles(
    x: Tensor,
    routing: Routing,
    stacked: StackedWeights,
    form: ExpertsForm,
    tilings: tuple[Tiling, Tiling],
    added: Tensor | None = None,
) -> Tensor:
    """`mix_stacked` with choices sorted by expert.

    Args:
        tilings: of the product before the gate and of the one behind it, of one height.
    """
    tokens, hidden = x.shape
    top_k = routing.experts.shape[1]
    order, tiles = sort(routing, stacked, form, tilings[0].height)
    inner = x.new_empty(tokens * top_k, form.size)
    rows = x.new_empty(tokens * top_k, hidden)
    multiply(x, stacked, form, routing, order, tiles, inner, tilings[0], gated=True)
    multiply(inner, stacked, form, routing, order, tiles, rows, tilings[1], gated=False)
    out = torch.empty_like(x)
    block = min(2048, triton.next_power_of_2(hidden))
    sum_kernel[(tokens, triton.cdiv(hidden, block))](
        rows,
        routing.weights,
        routing.experts,
        x if added is None else added,
        out,
        stacked.begin,
        OWNED=len(stacked.down),
        TOP_K=top_k,
        N=hidden,
        BLOCK=block,
        WEIGHTED=not form.on_inputs,
        ADDED=added is not None,
        **overlap(x.device),
    )
    return out


def sort(routing: Routing, stacked: StackedWeights, form: ExpertsForm, height: int) -> tuple[Tensor, Tensor]:
    """Sort choices by expert.

    Returns:
        order: [choices] int32, the choices of the experts in `stacked`, by expert and token; then unwritten.
        tiles: [most tiles, 3] int32, see `sort_kernel`.
    """
    experts, owned = routing.experts, len(stacked.down)
    tokens, top_k = experts.shape
    choices, chunk = tokens * top_k, _chunk(tokens) * top_k
    padded = triton.next_power_of_2(chunk)
    counts = routing.counts
    if counts is None:
        counts = _empty_counts(tokens, form.num_experts, experts.device)
        count_kernel[(counts.shape[0],)](
            experts, counts, choices, CHUNK=chunk, PADDED=padded, COLUMNS=counts.shape[1], **overlap(experts.device)
        )
    order = torch.empty(choices, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(_most_tiles(choices, owned, height), 3, dtype=torch.int32, device=experts.device)
    sort_kernel[(counts.shape[0],)](
        experts,
        counts,
        order,
        tiles,
        choices,
        counts.shape[0],
        len(tiles),
        stacked.begin,
        OWNED=owned,
        CHUNK=chunk,
        PADDED=padded,
        COLUMNS=counts.shape[1],
        HEIGHT=height,
        **overlap(experts.device),
    )
    return order, tiles


def multiply(
    x: Tensor,
    stacked: StackedWeights,
    form: ExpertsForm,
    routing: Routing,
    order: Tensor,
    tiles: Tensor,
    out: Tensor,
    tiling: Tiling,
    *,
    gated: bool,
) -> None:
    """Launch `grouped_kernel` of one of the products.

    Args:
        x, out: [T, hidden_size] and [choices, size] if `gated`, else [choices, size] and [choices, hidden_size].
        order, tiles: of `sort`, for the tiling's height.
    """
    weight, bias = (stacked.gate_up, stacked.gate_up_bias) if gated else (stacked.down, stacked.down_bias)
    outputs, inputs, parts = out.shape[1], x.shape[1], 2 if gated else 1
    alpha, limit, activation = _gate(form)
    matrix: Any = weight
    if tiling.copies:
        shape, strides = [len(weight) * parts, outputs, inputs], [outputs * inputs, inputs, 1]
        matrix = TensorDescriptor(weight, shape, strides, [parts, tiling.width, tiling.depth])
    given: Any = x
    if tiling.copies_rows:
        given = TensorDescriptor(x, [*x.shape], [inputs, 1], [tiling.height, tiling.depth])
    columns = triton.cdiv(outputs, tiling.width)
    grid = triton.cdiv(len(tiles), tiling.side_by_side) * tiling.side_by_side * columns
    grouped_kernel[(grid,)](
        given,
        matrix,
        x if bias is None else bias,
        routing.weights,
        order,
        tiles,
        out,
        len(tiles),
        alpha,
        limit,
        TOP_K=routing.experts.shape[1],
        N=outputs,
        K=inputs,
        HEIGHT=tiling.height,
        WIDTH=tiling.width,
        DEPTH=tiling.depth,
        SIDE_BY_SIDE=tiling.side_by_side,
        GATED=gated,
        ACTIVATION=activation,
        BIASED=bias is not None,
        WEIGHTED=gated and form.on_inputs,
        TURNED=tiling.turned,
        COPIES=tiling.copies,
        COPIES_ROWS=tiling.copies_rows,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlap(x.device),
    )


def row_plans(x: Tensor, form: ExpertsForm) -> tuple[RowPlan, RowPlan]:
    """Return the fastest division of both products of single rows, as measured on an H200."""
    if x.device.type != "cuda":
        return RowPlan(32, 64, 1), RowPlan(32, 64, 1)
    return RowPlan(2, 2048, 8) if form.hidden_size >= 2048 else RowPlan(2, 1024, 4), RowPlan(8, 256, 4)


def tilings_for(x: Tensor, top_k: int, stacked: StackedWeights, form: ExpertsForm) -> tuple[Tiling, Tiling]:
    """Return the fastest division of both products, as measured on an H200, by the mean number of an expert's rows."""
    mean = x.shape[0] * top_k / form.num_experts
    if x.device.type != "cuda":
        before, behind = _interpreted(mean, form.hidden_size), _interpreted(mean, form.size)
        return before, behind._replace(copies_rows=behind.copies and mean <= min(_HEIGHTS))
    return _tiling(x, mean, form.hidden_size, gated=True), _tiling(x, mean, form.size, gated=False)


def typical_tokens(form: ExpertsForm, top_k: int) -> list[int]:
    """Return numbers of tokens for which `mix_stacked` and `route_on_device` launch each of their kernels."""
    means = [*_HEIGHTS, _MOST_TURNED, _MOST_TURNED + 1]
    counts = {_FEW + 1, *(int(mean * form.num_experts / top_k) for mean in means)}
    return [1, *sorted(count for count in {*counts, _MANY, _MANY + 1} if count > _FEW)]


def _tiling(x: Tensor, mean: float, inputs: int, *, gated: bool) -> Tiling:
    hopper = torch.cuda.get_device_capability(x.device)[0] == 9
    copies = hopper and _aligned(inputs, x.dtype)
    if x.dtype.itemsize > 2:
        return Tiling(16 if mean <= 16 else 64, 32, 32, 4, 2, copies=False)
    if not hopper:
        return Tiling(16 if mean <= 16 else 64, 64 if gated else 128, 32, 4, 3, side_by_side=4, copies=False)
    if mean <= _MOST_TURNED:
        height = next((height for mean_, height in _HEIGHTS.items() if mean <= mean_), 64)
        return Tiling(height, 64 if gated else 128, 64, 4, 4, turned=True, copies=copies)
    width = 128 if gated else 256
    return Tiling(128, width, 64, 8, 4 if copies else 3, 8, copies=copies, copies_rows=copies and not gated)


def _interpreted(mean: float, inputs: int) -> Tiling:
    """Return a division for Triton's interpreter, which takes both forms of every choice."""
    return Tiling(
        16, 32, 16, 1, 1, side_by_side=3, turned=mean <= min(_HEIGHTS), copies=_aligned(inputs, torch.float16)
    )


def _aligned(inputs: int, dtype: torch.dtype) -> bool:
    """Return whether the copy engine can read rows of this length."""
    return inputs * dtype.itemsize % 16 == 0


def _most_tiles(choices: int, owned: int, height: int) -> int:
    """Return the most tiles of this many choices, which may all be of `owned` experts."""
    return (choices + min(choices, owned) * (height - 1)) // height


def _chunk(tokens: int) -> int:
    """Return the tokens whose choices are counted together."""
    return 8 if tokens <= _MANY else 32


def _empty_counts(tokens: int, num_experts: int, device: torch.device) -> Tensor:
    shape = triton.cdiv(tokens, _chunk(tokens)), triton.next_power_of_2(num_experts)
    return torch.empty(shape, dtype=torch.int32, device=device)


def _gate(form: ExpertsForm) -> tuple[float, float, str]:
    """Return the kernels' alpha, limit and activation."""
    if form.clamped is None:
        return 1.0, 0.0, form.activation
    return float(form.clamped.alpha), float(form.clamped.limit), "clamped"
