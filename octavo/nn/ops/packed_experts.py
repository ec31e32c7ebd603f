"""Products with packed matrices of experts on a GPU: the host's side of `triton_packed_experts.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import expert_launch as launch
from octavo.nn.ops import expert_tiles, packed_expert_rows, packed_expert_tiles
from octavo.nn.ops.expert_weights import PackedMatrices, gate_arguments
from octavo.nn.ops.routing import Routing
from octavo.nn.ops.tables import PLANES, numbers_in, planes_in
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.ops.triton_packed_experts import (
    packed_down_row_kernel,
    packed_gate_up_row_kernel,
    packed_grouped_kernel,
)

MOST_UNROUNDED = 16
"""Most tokens that are multiplied without rounding them to 8 bits."""
_HEIGHTS = {8: 16, 24: 32, 48: 64}
"""Mean number of an expert's rows -> height of tiles."""
_DEPTH = 128


class Tiling(NamedTuple):
    """How programs divide a product.

    Attributes:
        height, width, depth: choices, outputs (of gate and operand each) and codes of a tile.
        side_by_side, turned, copies, copies_rows: see `packed_grouped_kernel`.
        rounds: round the rows to 8 bits.
        stays: computed by `packed_expert_tiles.multiply` or, if it rounds, `expert_tiles.multiply_rounded`, which read
            only `height` and `side_by_side`.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int
    side_by_side: int = 1
    turned: bool = True
    copies: bool = True
    copies_rows: bool = False
    rounds: bool = False
    stays: bool = False


_STAYING = Tiling(128, 0, 0, 0, 0, side_by_side=packed_expert_tiles.BESIDE, stays=True)
"""Of the CUDA kernel, which divides the rest itself."""


class RowPlan(NamedTuple):
    """How programs divide a product of single rows: outputs of a program, and codes of a pass for each."""

    block_n: int
    block_c: int
    warps: int


def multiply(
    x: Tensor,
    matrices: PackedMatrices,
    bias: Tensor | None,
    form: ExpertsForm,
    routing: Routing,
    order: Tensor,
    tiles: Tensor,
    out: Tensor,
    tiling: Tiling,
    *,
    first: bool,
) -> None:
    """See `multiply` in `expert_products.py`."""
    if tiling.stays and tiling.rounds:
        given, top_k = expert_tiles.rounded_for(x, matrices), routing.experts.shape[1]
        expert_tiles.multiply_rounded(given, matrices, top_k, order, tiles, out, first=first)
        return
    if tiling.stays:
        top_k, size = routing.experts.shape[1], {"height": tiling.height, "beside": tiling.side_by_side}
        packed_expert_tiles.multiply(x, matrices, bias, form, top_k, order, tiles, out, first=first, **size)
        return
    outputs = out.shape[1]
    alpha, limit, activation = gate_arguments(form)
    rounded = expert_tiles.rounded_for(x, matrices) if tiling.rounds else None
    rows = x if rounded is None else rounded.codes
    # Values with minima are computed in float32, and then rounded.
    narrow = x.dtype if matrices.minima is None and x.dtype in PLANES else torch.float16
    kind, book = _looked_up(matrices, narrow)
    packed_grouped_kernel[launch.programs(tiles, outputs, tiling)](
        launch.rows_argument(rows, tiling.height, tiling),
        matrices.scales if rounded is None else rounded.own_scales,
        0 if rounded is None else rounded.own_scales.stride(1),
        launch.matrix_argument(matrices.codes, outputs, tiling),
        *_factors(matrices),
        book,
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
        KIND=kind,
        **_layout(matrices),
        ACTIVATION=activation,
        BIASED=bias is not None,
        ROUNDED=tiling.rounds,
        INTEGERS=rows.dtype == torch.int8,
        **launch.constants(tiling, form, first=first),
        **overlap(x.device),
    )


def gate_rows(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    routing: Routing,
    matrices: PackedMatrices,
    bias: Tensor | None,
    begin: int,
    form: ExpertsForm,
    plan: RowPlan | None = None,
) -> Tensor:
    """See `gate_rows` in `expert_rows.py`."""
    if plan is None and packed_expert_rows.serves(x, norm, matrices, form, routing.experts.shape[1], first=True):
        return packed_expert_rows.gate_rows(x, norm, routing, matrices, bias, begin, form)
    scale, eps = norm if norm is not None else (x, 0.0)
    plan = plan or row_plan(matrices, first=True)
    kind, book = _looked_up(matrices, torch.float16)
    choices = routing.experts.numel()
    inner = torch.empty(choices, form.size, dtype=matrices.dtype, device=x.device)
    alpha, limit, activation = gate_arguments(form)
    packed_gate_up_row_kernel[(cdiv(form.size, plan.block_n), choices)](
        x,
        scale,
        matrices.codes,
        *_factors(matrices),
        book,
        x if bias is None else bias,
        routing.weights,
        routing.experts,
        inner,
        begin,
        eps,
        alpha,
        limit,
        OWNED=len(matrices),
        TOP_K=routing.experts.shape[1],
        N=form.size,
        KIND=kind,
        **_layout(matrices),
        WORDS=matrices.words,
        BLOCK_N=plan.block_n,
        BLOCKS=_blocks(plan, matrices),
        NORMED=norm is not None,
        GATED=form.gated,
        ACTIVATION=activation,
        BIASED=bias is not None,
        WEIGHTED=form.on_inputs,
        num_warps=plan.warps,
        **overlap(x.device),
    )
    return inner


def sum_rows(
    inner: Tensor,
    routing: Routing,
    matrices: PackedMatrices,
    bias: Tensor | None,
    begin: int,
    form: ExpertsForm,
    out: Tensor,
    added: Tensor | None,
    plan: RowPlan | None = None,
) -> Tensor:
    """Write each token's sum of its experts' second products of `inner` [T * top_k, size], plus `added`, to out
    [T, hidden_size], and return it."""
    alike = added is None or added.dtype == out.dtype
    top_k = routing.experts.shape[1]
    if plan is None and alike and packed_expert_rows.serves(inner, None, matrices, form, top_k, first=False):
        return packed_expert_rows.sum_rows(inner, routing, matrices, bias, begin, form, out, added)
    plan = plan or row_plan(matrices, first=False)
    kind, book = _looked_up(matrices, torch.float16)
    packed_down_row_kernel[(cdiv(form.hidden_size, plan.block_n), len(out))](
        inner,
        matrices.codes,
        *_factors(matrices),
        book,
        inner if bias is None else bias,
        routing.weights,
        routing.experts,
        inner if added is None else added,
        out,
        begin,
        OWNED=len(matrices),
        TOP_K=routing.experts.shape[1],
        N=form.hidden_size,
        KIND=kind,
        **_layout(matrices),
        WORDS=matrices.words,
        BLOCK_N=plan.block_n,
        BLOCKS=_blocks(plan, matrices),
        BIASED=bias is not None,
        WEIGHTED=not form.on_inputs,
        ADDED=added is not None,
        num_warps=plan.warps,
        **overlap(inner.device),
    )
    return out


def row_plan(matrices: PackedMatrices, *, first: bool) -> RowPlan:
    """Return how programs divide a product of single rows."""
    if matrices.device.type != "cuda":
        return RowPlan(64, 64, 1)
    if matrices.fields > 1:
        return RowPlan(4, 512, 4) if first else RowPlan(4, 256, 4)
    return RowPlan(2, 2048, 4) if first else RowPlan(4, 1024, 4)


def tiling_for(x: Tensor, mean: float, matrices: PackedMatrices, form: ExpertsForm, *, first: bool) -> Tiling:
    """Return how programs divide a product, by the mean number of an expert's rows."""
    rounds = matrices.rounds and len(x) > MOST_UNROUNDED
    height = next((height for most, height in _HEIGHTS.items() if mean <= most), 128)
    if rounds and height == expert_tiles.HEIGHT and expert_tiles.serves_rounded(x, matrices, form, first=first):
        return _STAYING._replace(height=height, rounds=True)
    # Rounded rows are multiplied faster, except where large tiles aren't full and sums have several scales.
    rounded = rounds and (matrices.whole or height < 128 or mean > 128)
    if not rounded and packed_expert_tiles.serves(x, matrices, form, first=first):
        return _STAYING._replace(height=height)
    gated = first and form.gated
    most = matrices.words if matrices.fields > 1 else _DEPTH
    depth = most if matrices.scales.shape[1] == 1 else min(most, matrices.group)
    if x.device.type != "cuda":
        few = mean <= min(_HEIGHTS)
        turned, copies = few or not rounds, aligned(matrices)
        depth = min(depth, 64)
        depth = matrices.group if rounds and not matrices.whole else depth
        depth = matrices.words if matrices.fields > 1 else depth
        return Tiling(16 if few else 32, 64, depth, 1, 1, 3, turned, copies, copies and not first, rounds)
    hopper = torch.cuda.get_device_capability(x.device)[0] == 9
    copies = hopper and aligned(matrices)
    copies_rows = copies and not first and matrices.inputs * x.dtype.itemsize % 16 == 0
    if x.dtype.itemsize > 2:
        return Tiling(
            16 if mean <= 16 else 64, 32, depth if matrices.fields > 1 else min(depth, 32), 4, 2, copies=False
        )
    if height == 128 and rounds:
        width = (128 if gated else 256) if matrices.whole else (64 if gated else 128)
        return Tiling(128, width, depth, 8, 4 if copies else 3, 4, False, copies, copies_rows, True)
    # Compiled for Hopper, groups of words spill with 4 warps, and so do copies of few codes at a time beside 128 rows.
    grouped = matrices.fields > 1 and not matrices.whole
    warps = 8 if height == 128 or (height == 64 and grouped) else 4
    copies_rows = copies_rows and not (height == 128 and depth < 64)
    width, stages = 64 if gated else 128, 4 if height <= 32 else 3
    return Tiling(height, width, depth, warps, stages if hopper else 2, 1, True, copies, copies_rows, rounds)


def aligned(matrices: PackedMatrices) -> bool:
    """Return whether the copy engine can read the codes' rows."""
    return matrices.codes.shape[2] * matrices.codes.element_size() % 16 == 0


def _factors(matrices: PackedMatrices) -> tuple[Tensor, Tensor]:
    return matrices.scales, matrices.scales if matrices.minima is None else matrices.minima


def _looked_up(matrices: PackedMatrices, dtype: torch.dtype) -> tuple[str, Tensor | None]:
    """Return how a kernel finds numbers: KIND and the book of `triton_packed_numbers.py`.

    Args:
        dtype: of a table's numbers in registers.
    """
    if matrices.book is None:
        return matrices.kind, None
    if matrices.device.type != "cuda":
        return "table", numbers_in(matrices.book)  # the interpreter has no permutations
    return "planes", planes_in(matrices.book, dtype)


def _layout(matrices: PackedMatrices) -> dict[str, Any]:
    return {
        "K": matrices.inputs,
        "C": matrices.codes.shape[2],
        "FIELDS": matrices.fields,
        "GROUP": matrices.group,
        "MINIMA": matrices.minima is not None,
    }


def _blocks(plan: RowPlan, matrices: PackedMatrices) -> int:
    """Return the blocks of a pass, a power of two."""
    most = next_power_of_2(matrices.codes.shape[2] // matrices.words)
    return max(1, min(plan.block_c // matrices.words, most))
