"""Products of experts on a GPU: the host's side of the kernels that route, sort, multiply and sum.

No result passes through the host, so all of it can be recorded in graphs. Few tokens are multiplied one by one
(`triton_expert_rows.py`); more are sorted by expert and multiplied in tiles (`triton_experts.py`), many on a Hopper GPU
by a kernel in CUDA (`expert_tiles.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.ops import expert_launch as launch
from octavo.nn.ops import expert_tiles, packed_experts
from octavo.nn.ops.expert_rows import mix_rows
from octavo.nn.ops.expert_weights import Matrices, PackedMatrices, StackedWeights, gate_arguments
from octavo.nn.ops.routing import Routing, route
from octavo.nn.ops.triton_experts import grouped_kernel, sum_kernel, sum_norm_kernel
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.ops.triton_routing import (
    count_kernel,
    place_kernel,
    route_kernel,
    route_row_kernel,
    scan_kernel,
    sort_kernel,
)

_FEW = 4
"""Most tokens that are multiplied one by one; of more, several choose the same experts."""
_HEIGHTS = {8: 16, 24: 32}
"""Mean number of an expert's rows -> height of tiles that holds the rows of almost all experts."""
_MOST_TURNED = 48
_MANY_ROWS = 256
"""Mean number of an expert's rows from which on `expert_tiles` is faster."""
_MANY = 512
"""Tokens from which on programs that route take more of them, so that fewer counts are added up."""

_FEW_CHUNKS = 64
"""Most chunks of tokens whose counts every program that sorts adds up itself; of more, a launch before adds them up."""
_SCANNED = 16
"""Chunks of a program of that launch."""
_PER_WARP = 512
"""Numbers of a token's sum for each warp."""


class Tiling(NamedTuple):
    """How programs divide a product.

    Attributes:
        height, width, depth: choices, outputs (of gate and operand each) and inputs of a tile.
        side_by_side, turned, halves, copies, copies_rows: see `grouped_kernel`.
        stays: computed by `expert_tiles.multiply`, which reads only `height`.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int
    side_by_side: int = 1
    turned: bool = False
    halves: bool = False
    copies: bool = True
    copies_rows: bool = False
    stays: bool = False


AnyTiling = Tiling | packed_experts.Tiling

_STAYING = Tiling(expert_tiles.HEIGHT, 256, 64, 12, 4, stays=True)


def route_on_device(logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
    """See `route`; choices are counted, too, if `mix_stacked` needs it. logits [T, num_experts] contiguous."""
    if spec.scores == "mixer" or not logits.shape[0]:
        return route(logits, spec, correction)
    tokens, count = logits.shape
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=logits.device)
    if tokens == 1 and spec.groups == 1:
        route_row_kernel[(1,)](
            logits,
            logits if correction is None else correction,
            weights,
            experts,
            float(spec.scaling),
            float(spec.floor),
            E=count,
            COLUMNS=next_power_of_2(count),
            K=spec.top_k,
            SCORES=spec.scores,
            CORRECTED=correction is not None,
            NORMALIZED=spec.normalized,
            num_warps=8,
            **overlap(logits.device),
        )
        return Routing(weights, experts)
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
        SLOTS=next_power_of_2(spec.top_k),
        ROWS=rows,
        SCORES=spec.scores,
        CORRECTED=correction is not None,
        GROUPS=spec.groups,
        GROUPS_PADDED=next_power_of_2(spec.groups),
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
    y = summands(x, routing, stacked, form, added)
    return y if isinstance(y, Tensor) else y.total()


def summands(
    x: Tensor, routing: Routing, stacked: StackedWeights, form: ExpertsForm, added: Tensor | None = None
) -> Tensor | ExpertRows:
    """Return the sum of `mix_stacked`, or what remains to be summed, if that is faster."""
    if not x.shape[0]:
        return torch.empty_like(x)
    if x.shape[0] <= _FEW:
        return mix_rows(x, routing, stacked, form, added)
    tilings = tilings_for(x, routing.experts.shape[1], stacked, form)
    return mix_tiles(x, routing, stacked, form, tilings, added)


def mix_tiles(
    x: Tensor,
    routing: Routing,
    stacked: StackedWeights,
    form: ExpertsForm,
    tilings: tuple[AnyTiling, AnyTiling],
    added: Tensor | None = None,
) -> ExpertRows:
    """Return what `mix_stacked` sums, from choices sorted by expert.

    Args:
        tilings: of the product before the gate and of the one behind it, of one height.
    """
    tokens, hidden = x.shape
    top_k = routing.experts.shape[1]
    order, tiles = sort(routing, stacked, form, tilings[0].height)
    inner = x.new_empty(tokens * top_k, form.size)
    rows = x.new_empty(tokens * top_k, hidden)
    multiply(x, stacked, form, routing, order, tiles, inner, tilings[0], first=True)
    multiply(inner, stacked, form, routing, order, tiles, rows, tilings[1], first=False)
    return ExpertRows(rows, routing, stacked.begin, len(stacked.down), form, added)


def linear(x: Tensor, matrices: PackedMatrices, bias: Tensor | None, expert: int) -> Tensor:
    """Return the product of x [T, K] with one expert's matrix, plus its bias, by the kernels of `mix_stacked`: [T, N],
    a new tensor."""
    tokens, outputs = len(x), matrices.scales.shape[2]
    form = ExpertsForm(num_experts=len(matrices), hidden_size=outputs, size=matrices.inputs)
    stacked = StackedWeights(matrices, matrices, None, bias)
    experts = torch.full((tokens, 1), expert, dtype=torch.int32, device=x.device)
    routing = Routing(torch.ones(tokens, 1, device=x.device), experts)
    out = x.new_empty(tokens, outputs)
    if tokens <= _FEW:
        return packed_experts.sum_rows(x, routing, matrices, bias, 0, form, out, None)
    tiling = packed_experts.tiling_for(x, tokens, matrices, form, first=False)
    order, tiles = sort(routing, stacked, form, tiling.height)
    packed_experts.multiply(x, matrices, bias, form, routing, order, tiles, out, tiling, first=False)
    return out


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """`Summands` of a stream: the outputs of each token's experts, before they are weighted.

    Attributes:
        rows: [choices, hidden_size]; not written are those of experts outside [begin, begin + owned).
        added: [T, hidden_size] contiguous, added to the sum; None for none.
    """

    rows: Tensor
    routing: Routing
    begin: int
    owned: int
    form: ExpertsForm
    added: Tensor | None

    def total(self) -> Tensor:
        out = self.rows.new_empty(self._tokens, self.form.hidden_size)
        block = min(2048, next_power_of_2(self.form.hidden_size))
        sum_kernel[(self._tokens, cdiv(self.form.hidden_size, block))](
            *self._given, out, self.begin, BLOCK=block, **self._constants
        )
        return out

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        scale, eps = norm
        out = torch.empty(stream.shape, dtype=dtype, device=stream.device)
        block = next_power_of_2(self.form.hidden_size)
        warps = max(1, min(16, block // _PER_WARP))
        sum_norm_kernel[(self._tokens,)](
            *self._given, stream, scale, out, self.begin, eps, BLOCK=block, num_warps=warps, **self._constants
        )
        return out

    @property
    def _tokens(self) -> int:
        return self.routing.experts.shape[0]

    @property
    def _given(self) -> tuple[Tensor, ...]:
        rows = self.rows
        return rows, self.routing.weights, self.routing.experts, rows if self.added is None else self.added

    @property
    def _constants(self) -> dict[str, Any]:
        return {
            "OWNED": self.owned,
            "TOP_K": self.routing.experts.shape[1],
            "N": self.form.hidden_size,
            "WEIGHTED": not self.form.on_inputs,
            "ADDED": self.added is not None,
            "WHOLE": self.owned == self.form.num_experts,
            **overlap(self.rows.device),
        }


def sort(routing: Routing, stacked: StackedWeights, form: ExpertsForm, height: int) -> tuple[Tensor, Tensor]:
    """Sort choices by expert.

    Returns:
        order: [choices] int32, the choices of the experts in `stacked`, by expert and token; then unwritten.
        tiles: [most tiles, 3] int32, see `sort_kernel`.
    """
    experts, owned = routing.experts, len(stacked.down)
    tokens, top_k = experts.shape
    choices, chunk = tokens * top_k, _chunk(tokens) * top_k
    padded = next_power_of_2(chunk)
    counts = routing.counts
    if counts is None:
        counts = _empty_counts(tokens, form.num_experts, experts.device)
        count_kernel[(counts.shape[0],)](
            experts, counts, choices, CHUNK=chunk, PADDED=padded, COLUMNS=counts.shape[1], **overlap(experts.device)
        )
    order = torch.empty(choices, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(_most_tiles(choices, owned, height), 3, dtype=torch.int32, device=experts.device)
    chunks, columns = counts.shape
    shared: dict[str, Any] = {"OWNED": owned, "COLUMNS": columns, **overlap(experts.device)}
    if chunks > _FEW_CHUNKS:
        places = torch.empty_like(counts)
        scan_kernel[(cdiv(chunks, _SCANNED),)](
            *(counts, places, tiles, choices, chunks, len(tiles), stacked.begin),
            HEIGHT=height,
            STEP=max(32, min(128, 16384 // columns)),
            OWN=_SCANNED,
            num_warps=16,
            **shared,
        )
        width = min(32, top_k & -top_k)
        place_kernel[(chunks,)](
            *(experts, places, order, choices, stacked.begin),
            CHUNK=chunk,
            PADDED=padded,
            WIDTH=width,
            num_warps=8,
            **shared,
        )
    else:
        sort_kernel[(chunks,)](
            *(experts, counts, order, tiles, choices, chunks, len(tiles), stacked.begin),
            CHUNK=chunk,
            PADDED=padded,
            HEIGHT=height,
            **shared,
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
    tiling: AnyTiling,
    *,
    first: bool,
) -> None:
    """Compute the product before the activation, or the one behind it.

    Args:
        x, out: [T, hidden_size] and [choices, size] if `first`, else [choices, size] and [choices, hidden_size].
        order, tiles: of `sort`, for the tiling's height.
    """
    weight, bias = (stacked.gate_up, stacked.gate_up_bias) if first else (stacked.down, stacked.down_bias)
    if isinstance(weight, PackedMatrices):
        assert isinstance(tiling, packed_experts.Tiling)
        packed_experts.multiply(x, weight, bias, form, routing, order, tiles, out, tiling, first=first)
        return
    assert isinstance(tiling, Tiling)
    if tiling.stays:
        expert_tiles.multiply(x, weight, routing.experts.shape[1], order, tiles, out, first=first)
    else:
        _multiply_plain(x, weight, bias, form, routing, order, tiles, out, tiling, first=first)


def _multiply_plain(
    x: Tensor,
    weight: Tensor,
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
    """Compute `multiply` by matrices that are not packed."""
    outputs, height = out.shape[1], tiling.height
    alpha, limit, activation = gate_arguments(form)
    grouped_kernel[launch.programs(tiles, outputs, tiling)](
        launch.rows_argument(x, height, tiling),
        launch.rows_argument(x, height // 2, tiling),
        launch.matrix_argument(weight, outputs, tiling),
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
        K=x.shape[1],
        ACTIVATION=activation,
        BIASED=bias is not None,
        HALVES=tiling.halves,
        **launch.constants(tiling, form, first=first),
        **overlap(x.device),
    )


def tilings_for(x: Tensor, top_k: int, stacked: StackedWeights, form: ExpertsForm) -> tuple[AnyTiling, AnyTiling]:
    """Return the fastest division of both products, as measured on an H200, by the mean number of an expert's rows."""
    mean = x.shape[0] * top_k / form.num_experts
    if x.is_cuda and mean >= _MANY_ROWS and expert_tiles.serves(x, stacked, form):
        return _STAYING, _STAYING
    first = _tiling_for(x, mean, stacked.gate_up, form, first=True)
    second = _tiling_for(x, mean, stacked.down, form, first=False)
    # Choices are sorted once for both products; perhaps only one of them is packed.
    height = min(first.height, second.height)
    return first._replace(height=height), second._replace(height=height)


def _tiling_for(x: Tensor, mean: float, matrices: Matrices, form: ExpertsForm, *, first: bool) -> AnyTiling:
    if isinstance(matrices, PackedMatrices):
        return packed_experts.tiling_for(x, mean, matrices, form, first=first)
    inputs = form.hidden_size if first else form.size
    if x.is_cuda:
        return _tiling(x, mean, inputs, first=first, gated=first and form.gated)
    tiling = _interpreted(mean, inputs)
    return tiling if first else tiling._replace(copies_rows=tiling.copies)


def typical_tokens(form: ExpertsForm, top_k: int) -> list[int]:
    """Return numbers of tokens for which `mix_stacked` and `route_on_device` launch each of their kernels."""
    means = [*_HEIGHTS, _MOST_TURNED, _MOST_TURNED + 1]
    counts = {_FEW + 1, *(int(mean * form.num_experts / top_k) for mean in means)}
    counts |= {_MANY, _MANY + 1, _FEW_CHUNKS * _chunk(_MANY + 1) + 1}
    return [1, 2, *sorted(count for count in counts if count > _FEW)]


def _tiling(x: Tensor, mean: float, inputs: int, *, first: bool, gated: bool) -> Tiling:
    hopper = torch.cuda.get_device_capability(x.device)[0] == 9
    copies = hopper and _aligned(inputs, x.dtype)
    if x.dtype.itemsize > 2:
        return Tiling(16 if mean <= 16 else 64, 32, 32, 4, 2, copies=False)
    if not hopper:
        return Tiling(16 if mean <= 16 else 64, 64 if gated else 128, 32, 4, 3, side_by_side=4, copies=False)
    if mean <= _MOST_TURNED:
        height = next((height for most, height in _HEIGHTS.items() if mean <= most), 64)
        width, depth, stages = (64, 128, 3) if gated else (128, 128, 3) if height == 16 else (128, 64, 4)
        return Tiling(height, width, depth, 4, stages, turned=True, copies=copies, copies_rows=copies and not first)
    if not first:  # two programs share a multiprocessor, and one multiplies while the other begins or ends a tile
        return Tiling(128, 128, 64, 4, 3, side_by_side=4, halves=True, copies=copies, copies_rows=copies)
    width = 128 if gated else 256
    return Tiling(128, width, 64, 8, 4 if copies else 3, side_by_side=4, halves=True, copies=copies)


def _interpreted(mean: float, inputs: int) -> Tiling:
    """Return a division for Triton's interpreter, which takes both forms of every choice."""
    few, copies = mean <= min(_HEIGHTS), _aligned(inputs, torch.float16)
    return Tiling(16 if few else 32, 32, 16, 1, 1, side_by_side=3, turned=few, halves=not few, copies=copies)


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
    shape = cdiv(tokens, _chunk(tokens)), next_power_of_2(num_experts)
    return torch.empty(shape, dtype=torch.int32, device=device)
