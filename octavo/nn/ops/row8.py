"""Products of up to 8 rows with a matrix of 8-bit numbers on a Hopper GPU: `stored_row.py` for `Floats`.

On an H200, the products of a layer of E4M3 take 0.9 of the time of Triton's kernel in `triton_floats.py`.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from octavo.nn.ops import nvrtc, stored_row
from octavo.nn.ops.floats import DTYPE, TILE, Floats
from octavo.nn.ops.ring import COLUMNS, MOST_ROWS, RowForm
from octavo.nn.ops.stored_row import StoredForm

_LIMIT = 0.01
"""Largest relative error of the trial."""


def fits(matrix: Floats, *, gated: bool) -> bool:
    """Return whether `row_product` supports a matrix."""
    return stored_row.fits(matrix.outputs, matrix.inputs, matrix.codes.dtype, tile=matrix.tile, gated=gated)


@functools.cache
def usable(device: torch.device) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why it doesn't."""
    if not stored_row.runs(device):
        return False
    return nvrtc.trusted("8-bit weights are multiplied with few rows", functools.partial(_deviations, device), _LIMIT)


def _deviations(device: torch.device) -> list[float]:
    """Return the relative errors of products with random matrices, compared with float32 on the CPU."""
    random = torch.Generator().manual_seed(0)
    form = RowForm(gated=False, normed=False, biased=False, added=False, x_float=False, out_float=True)
    values = torch.randn(2 * TILE, 320, generator=random)
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
        several = torch.randn(5, matrix.inputs, generator=random).bfloat16()
        expected = several.float() @ matrix.values().T
        made = rows_product(several.to(device), on_device, None, torch.float32, torch.bfloat16)
        deviations.append(float((made.cpu() - expected).norm() / expected.norm()))
    return deviations


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
    return stored_row.product(
        x,
        matrix.codes,
        matrix.scales,
        _form(matrix, narrow),
        bias=bias,
        norm=norm,
        gated=gated,
        add_to=add_to,
        dtype=dtype,
    )


def serves_rows(rows: int, matrix: Floats, dtype: torch.dtype, *, gated: bool = False) -> bool:
    """Return whether `rows_product` supports this number of rows of this dtype."""
    if dtype.itemsize != 2 or not 1 < rows <= MOST_ROWS or not stored_row.runs(matrix.codes.device):
        return False
    return stored_row.fits_rows(_form(matrix, dtype), rows, gated=gated) and usable(matrix.codes.device)


def rows_product(
    x: Tensor,
    matrix: Floats,
    bias: Tensor | None,
    dtype: torch.dtype,
    narrow: torch.dtype,
    *,
    gated: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """Return the product of 2 to 8 rows, contiguous and of the dtype `narrow`; see `stored_row.rows_product`."""
    return stored_row.rows_product(
        x, matrix.codes, matrix.scales, _form(matrix, narrow), bias=bias, gated=gated, add_to=add_to, dtype=dtype
    )


def compile_rows_ahead(matrix: Floats, narrow: torch.dtype) -> None:
    """Compile the kernels for 2 to 8 rows in the background, for all that may be fused with the product."""
    for rows, gated, added in itertools.product(COLUMNS, (False, True), (False, True)):
        if not (gated and added) and serves_rows(rows, matrix, narrow, gated=gated):
            form = RowForm(gated, normed=False, biased=False, added=added, x_float=False, out_float=False)
            stored_row.compile_rows_ahead(_form(matrix, narrow), rows, form)


def compile_ahead(matrix: Floats, narrow: torch.dtype, form: RowForm) -> None:
    """Compile the kernel for a matrix in the background."""
    stored_row.compile_ahead(_form(matrix, narrow), form)


def _form(matrix: Floats, narrow: torch.dtype) -> StoredForm:
    return StoredForm(matrix.codes.dtype, matrix.tile, narrow, matrix.outputs, matrix.inputs)
