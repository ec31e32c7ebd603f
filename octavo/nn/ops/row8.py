"""Products of one row with a matrix of 8-bit numbers on a Hopper GPU, by the CUDA kernel `cuda/row8.cu`.

A block for each multiprocessor copies numbers into shared memory far ahead of those that it multiplies, and the first
ones while the previous launch ends. So memory is read with fewer pauses: on an H200, the products of a layer of E4M3
take 0.9 of the time of Triton's kernel in `triton_floats.py`.
"""

from __future__ import annotations

import functools
from ctypes import c_float
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from octavo.nn.ops import nvrtc
from octavo.nn.ops.floats import DTYPE, TILE, Floats
from octavo.nn.ops.fragments import RowForm
from octavo.nn.ops.nvrtc import Kernel, address

_FORMS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}
_STRIP = 16
"""Outputs of a block."""
_STEP = 64
_SPAN = 2
"""Steps of 64 inputs that a warp copies at a time."""
_SPAN_BYTES = _SPAN * _STRIP * _STEP
_WARPS = 16
_SHARED = 220 << 10
"""Bytes of shared memory for the row and numbers."""
_MOST_INPUTS = 20480
_LIMIT = 0.01
"""Largest relative error of the trial."""


class RowPlan(NamedTuple):
    """A block's warps, and the spans that each has in shared memory or on the way there."""

    warps: int
    depth: int


def fits(matrix: Floats, *, gated: bool) -> bool:
    """Return whether `row_product` supports a matrix."""
    parts = 2 if gated else 1
    if matrix.outputs % (_STRIP * parts) or (matrix.tile and matrix.outputs % (TILE * parts)):
        return False
    return matrix.inputs % _STEP == 0 and matrix.inputs <= _MOST_INPUTS


@functools.cache
def usable(device: torch.device) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why it doesn't."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return nvrtc.trusted("8-bit weights are multiplied with one row", functools.partial(_deviation, device), _LIMIT)


def _deviation(device: torch.device) -> float:
    """Return the largest relative error of products with random matrices, compared with float32 on the CPU."""
    random = torch.Generator().manual_seed(0)
    form = RowForm(gated=False, normed=False, biased=False, added=False, x_float=False, out_float=True)
    values = torch.randn(2 * TILE, 5 * _STEP, generator=random)
    scales = torch.rand(2 * TILE, generator=random) + 0.5
    matrices = [Floats((values * 30).to(dtype), scales) for dtype in (DTYPE, torch.int8)]
    matrices.append(Floats(matrices[0].codes, torch.rand(2, 4, generator=random) + 0.5))
    placed = [Floats(matrix.codes.to(device), matrix.scales.to(device)) for matrix in matrices]
    for matrix in placed:
        compile_ahead(matrix, torch.bfloat16, form)
    deviations = []
    for matrix, on_device in zip(matrices, placed, strict=True):
        x = torch.randn(1, matrix.inputs, generator=random).bfloat16()
        expected = x.float() @ matrix.values().T
        made = row_product(x.to(device), on_device, dtype=torch.float32, narrow=torch.bfloat16)
        deviations.append(float((made.cpu() - expected).norm() / expected.norm()))
    return max(deviations)


def row_product(
    x: Tensor,
    matrix: Floats,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    narrow: torch.dtype,
) -> Tensor:
    """Return the product of one row; see `few_rows.fused_product`.

    Args:
        narrow: the 16-bit dtype of the norm's weights, of the bias, and of x and the result if they are not float32.
    """
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    out = add_to
    if out is None:
        out = torch.empty(1, outputs, dtype=dtype or narrow, device=x.device)
    scale, eps = norm if norm is not None else (x, 0.0)
    form = RowForm(
        gated=gated,
        normed=norm is not None,
        biased=bias is not None,
        added=add_to is not None,
        x_float=x.dtype == torch.float32,
        out_float=out.dtype == torch.float32,
    )
    form_of_matrix = (matrix.codes.dtype, matrix.tile, narrow, matrix.outputs, matrix.inputs)
    _kernel(*form_of_matrix, form).launch(
        (min(outputs // _STRIP, _multiprocessors(x.device)), 1, 1),
        [
            address(x),
            address(scale),
            address(matrix.codes),
            address(matrix.scales),
            address(x if bias is None else bias),
            address(out),
            c_float(eps),
        ],
    )
    return out


def compile_ahead(matrix: Floats, narrow: torch.dtype, form: RowForm) -> None:
    """Compile the kernel for a matrix in the background."""
    source, macros, _, _ = _source(matrix.codes.dtype, matrix.tile, narrow, matrix.outputs, matrix.inputs, form)
    nvrtc.compile_ahead(source, macros)


def row_plan(inputs: int, *, gated: bool) -> RowPlan:
    """Return the fastest division, as measured on an H200: a block fills a multiprocessor's shared memory. With two
    smaller ones, of this launch and the next, a whole model is slower."""
    span = _WARPS * _SPAN_BYTES * (2 if gated else 1)
    return RowPlan(_WARPS, (_SHARED - 2 * inputs) // span)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(dtype: torch.dtype, tile: int, narrow: torch.dtype, outputs: int, inputs: int, form: RowForm) -> Kernel:
    return Kernel("row8", *_source(dtype, tile, narrow, outputs, inputs, form))


def _source(
    dtype: torch.dtype, tile: int, narrow: torch.dtype, outputs: int, inputs: int, form: RowForm
) -> tuple[str, dict[str, int], int, int]:
    """Return source, macros, threads and bytes of shared memory."""
    warps, depth = row_plan(inputs, gated=form.gated)
    macros = {"FORM": _FORMS[dtype], "TILED": int(tile > 0), "STRIDE": triton.cdiv(inputs, 4 * TILE) * 4}
    macros |= {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(narrow == torch.float16)}
    macros |= {"N": outputs, "K": inputs, "WARPS": warps, "SPAN": _SPAN, "DEPTH": depth}
    macros |= {name.upper(): int(value) for name, value in form._asdict().items()}
    shared = warps * depth * _SPAN_BYTES * (2 if form.gated else 1) + 2 * inputs
    return nvrtc.source_of("integers.cuh", "row8.cu"), macros, 32 * warps, shared
