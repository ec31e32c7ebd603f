"""The gated product of a feed-forward layer in one launch, for some hundred rows on a Hopper GPU.

It saves the gate's launch, which would read and write the product again. A tile has columns of the gate and of its
operand, so that the matrix units compute both at once. With tiles of one size, part of the multiprocessors would idle
in the last round; so the last round's tiles are narrower, one per multiprocessor.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.device.launch_sizes import cdiv
from octavo.nn.ops.triton_gated import gated_kernel
from octavo.nn.ops.triton_overlap import overlap

TYPICAL = 256
"""A number of rows that `serves`."""
_WIDE = 128
"""Columns of the result in a wide tile; slim tiles of the last round have three quarters."""
_SLIM = 96
_SLIM_COST = 104
"""Relative time of a slim tile, 128 for a wide one: its half and its quarter are multiplied separately."""
_ROWS = 128
_DEPTH = 64


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(x @ gate^T) * (x @ up^T), in float32 up to one rounding at the end.

    Args:
        x: [M, K] contiguous, of a 16-bit dtype, K a multiple of 64.
        weight: [2N, K] contiguous, of x's dtype: gate and up.

    Returns:
        [M, N].
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    row_tiles = cdiv(rows, _ROWS)
    side_by_side = max(1, multiprocessors(x.device) // row_tiles)
    wide, slim = divided(outputs, side_by_side)
    tiles = [
        TensorDescriptor(weight, [2, outputs, inputs], [outputs * inputs, inputs, 1], [2, columns, _DEPTH])
        for columns in (_WIDE, _WIDE // 2, _WIDE // 4)
    ]
    gated_kernel[(side_by_side * row_tiles,)](
        TensorDescriptor(x, [rows, inputs], [inputs, 1], [_ROWS, _DEPTH]),
        *tiles,
        out,
        rows,
        wide,
        slim,
        N=outputs,
        K=inputs,
        ROWS=_ROWS,
        WIDE=_WIDE,
        DEPTH=_DEPTH,
        num_warps=8,
        num_stages=4,
        **overlap(x.device),
    )
    return out


def serves(rows: int, weight: Tensor) -> bool:
    """Return whether `gated_product` supports this matrix on its device, and `rows` fill its tiles more than half."""
    hopper = weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] == 9
    fills = -rows % _ROWS < _ROWS // 2
    return hopper and fills and weight.dtype.itemsize == 2 and weight.shape[1] % _DEPTH == 0


def divided(columns: int, side_by_side: int) -> tuple[int, int]:
    """Return the (wide, slim) numbers of tiles that take the least time, with `side_by_side` tiles per round."""
    whole = cdiv(columns, _WIDE)
    ways = []
    for wide in {whole, *range(0, columns // _WIDE + 1, side_by_side)}:
        slim = cdiv(max(0, columns - wide * _WIDE), _SLIM)
        time = cdiv(wide, side_by_side) * _WIDE + cdiv(slim, side_by_side) * _SLIM_COST
        ways.append((time, slim, wide))
    _, slim, wide = min(ways)
    return wide, slim


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return their number; for Triton's interpreter a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
