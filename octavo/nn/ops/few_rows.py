"""Products of few rows with a matrix on a GPU; with one row, fused with a decoder's adjacent operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv
from octavo.nn.ops.triton_gemv import row_kernel, rows_kernel
from octavo.nn.ops.triton_overlap import overlap

MAX_ROWS = 16
"""Rows of a tile of the matrix units."""
_MAX_OUTPUTS = 8192
"""Matrix size up to which `few_product` is faster than the library (on an H200 by 7 to 20 %)."""


def fused_product(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return y = rms_norm(x) @ weight^T + bias, with the given options; in float32 up to one rounding at the end.

    Args:
        x: [1, K] contiguous.
        weight: [N, K] contiguous, or [2N, K] if `gated`; may be read before the previous launch ends.
        bias: [N].
        norm: weight [K] and epsilon of an RMS norm of x.
        gated: y = silu(first half) * second half.
        add_to: [1, N] contiguous; y is added to it **in place**, and it is returned.
        dtype: of y; None for the weight's.

    Returns:
        [1, N].
    """
    inputs = x.shape[1]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = add_to
    if out is None:
        out = torch.empty(1, outputs, dtype=dtype or weight.dtype, device=x.device)
    scale, eps = norm if norm is not None else (x, 0.0)
    plan = _held_plan(outputs, inputs, gated=gated, normed=norm is not None, device=x.device)
    plan = plan or row_plan(inputs, gated=gated, normed=norm is not None, device=x.device)
    row_kernel[(cdiv(outputs, plan.block_n),)](
        x,
        scale,
        weight,
        x if bias is None else bias,
        out,
        out,
        eps,
        N=outputs,
        K=inputs,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        NORMED=norm is not None,
        GATED=gated,
        BIASED=bias is not None,
        ADDED=add_to is not None,
        num_warps=plan.warps,
        AHEAD=plan.ahead,
        HELD=plan.held,
        **overlap(x.device),
    )
    return out


def few_product(x: Tensor, weight: Tensor, add_to: Tensor | None = None) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T, both contiguous and of one 16-bit dtype, M at most MAX_ROWS.

    If `add_to` [M, N] is given, the product is added to it **in place**, and it is returned.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=weight.dtype, device=x.device) if add_to is None else add_to
    block_n, block_k, warps, stages = (16, 512, 2, 3) if inputs <= _MAX_OUTPUTS else (16, 256, 2, 5)
    if not x.is_cuda:
        block_n, block_k, warps, stages = 128, 64, 1, 1
    rows_kernel[(cdiv(outputs, block_n),)](
        x,
        weight,
        out,
        rows,
        N=outputs,
        K=inputs,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        ADDED=add_to is not None,
        num_warps=warps,
        num_stages=stages,
        AHEAD=512 if inputs % 512 == 0 else 0,
        **overlap(x.device),
    )
    return out


def pays(rows: int, outputs: int) -> bool:
    """Return whether `few_product` is faster than the library."""
    return 0 < rows <= MAX_ROWS and outputs <= _MAX_OUTPUTS


_MOST_HELD = 2048 * 4096
"""Size of matrices that registers hold while the launch before runs, such as attention, which reads little."""
_MOST_HELD_NORMED = 256 * 4096
"""The same behind a norm: most launches before it read matrices themselves."""


class RowPlan(NamedTuple):
    """How programs divide the product of one row.

    Attributes:
        block_n: matrix rows of a program.
        block_k: columns per pass.
        ahead: prefetched elements of each matrix row.
        held: a pass has all columns, and its loads begin before the wait.
    """

    block_n: int
    block_k: int
    warps: int
    ahead: int
    held: bool = False


def row_plan(inputs: int, *, gated: bool, normed: bool, device: torch.device) -> RowPlan:
    """Return the fastest division of large matrices, as measured on an H200.

    Each program reads the norm's weights once, so programs with a norm are larger.
    """
    if device.type != "cuda":
        return _INTERPRETED
    if inputs < 2048:
        return RowPlan(2, 1024, 4, 0) if gated else RowPlan(4, 1024, 4, 0)
    if gated:
        return RowPlan(1, 4096, 8, 0) if inputs % 4096 == 0 else RowPlan(2, 2048, 8, 0)
    if normed:
        return RowPlan(4, 2048, 8, 0)
    ahead = 512 if inputs % 512 == 0 else 0
    return RowPlan(8, 512, 8, ahead) if inputs > 8192 or inputs % 2048 else RowPlan(4, 2048, 8, ahead)


def holds(outputs: int, inputs: int, *, gated: bool, normed: bool, device: torch.device) -> bool:
    """Return whether registers hold a matrix while the launch before still runs."""
    return _held_plan(outputs, inputs, gated=gated, normed=normed, device=device) is not None


def _held_plan(outputs: int, inputs: int, *, gated: bool, normed: bool, device: torch.device) -> RowPlan | None:
    """Return a division of a matrix that is loaded while the launch before still runs; None if that is no faster."""
    if gated:
        return None
    if device.type != "cuda":
        return _INTERPRETED._replace(held=True) if inputs <= _INTERPRETED.block_k else None
    if inputs not in (2048, 4096) or outputs * inputs > (_MOST_HELD_NORMED if normed else _MOST_HELD):
        return None
    return RowPlan(1, inputs, 4, 0, held=True) if normed else RowPlan(4, inputs, 8, 0, held=True)


_INTERPRETED = RowPlan(128, 64, 1, 0)
"""Few and large programs for Triton's interpreter, which runs them in sequence."""
