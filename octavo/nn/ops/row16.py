"""Products of up to 8 rows with a plain 16-bit matrix on a Hopper GPU: `stored_row.py` for tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from octavo.nn.ops import nvrtc, stored_row
from octavo.nn.ops.ring import RingPlan, RowForm
from octavo.nn.ops.stored_row import Joined, JoinedCode, StoredForm

_LIMIT = 0.01
"""Largest relative error of the trial."""


def serves(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, scale: torch.dtype | None, gated: bool
) -> bool:
    """Return whether `row_product` multiplies with a matrix.

    Args:
        scale: dtype of the norm's weights; None without a norm.
    """
    if dtype.itemsize != 2 or scale not in (None, dtype):
        return False
    return stored_row.fits(outputs, inputs, dtype, gated=gated) and _usable(device)


@functools.cache
def _usable(device: torch.device) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why it doesn't."""
    if not stored_row.runs(device):
        return False
    return nvrtc.trusted("16-bit weights are multiplied with few rows", functools.partial(_deviations, device), _LIMIT)


def _deviations(device: torch.device) -> list[float]:
    """Return the relative errors of products with random matrices, compared with float32 on the CPU."""
    random = torch.Generator().manual_seed(0)
    values, x = torch.randn(256, 320, generator=random), torch.randn(1, 320, generator=random)
    weight, scale = values.bfloat16(), torch.rand(320, generator=random).bfloat16()
    normed = x * x.square().mean().add(1e-5).rsqrt() * scale.float()
    deviations = []
    for given, norm, row in ((x.bfloat16(), None, x.bfloat16().float()), (x, (scale.to(device), 1e-5), normed)):
        expected = row @ weight.float().T
        made = row_product(given.to(device), weight.to(device), norm=norm, dtype=torch.float32)
        deviations.append(float((made.cpu() - expected).norm() / expected.norm()))
    several = torch.randn(5, 320, generator=random).bfloat16()
    expected = several.float() @ weight.float().T
    made = rows_product(several.to(device), weight.to(device), dtype=torch.float32)
    return [*deviations, float((made.cpu() - expected).norm() / expected.norm())]


def row_product(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    plan: RingPlan | None = None,
    joined: Joined | None = None,
) -> Tensor:
    """Return the product of one row; see `few_rows.fused_product`. The norm's weights are of the matrix's dtype.

    Args:
        plan: None for the fastest.
        joined: what is added in the launch, for the matrix's dtype.
    """
    return stored_row.product(
        x,
        weight,
        None,
        _form(weight.shape[0], weight.shape[1], weight.dtype),
        bias=bias,
        norm=norm,
        gated=gated,
        add_to=add_to,
        dtype=dtype,
        plan=plan,
        joined=joined,
    )


def serves_rows(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, gated: bool) -> bool:
    """Return whether `rows_product` supports this number of rows and a matrix of this shape."""
    if dtype.itemsize != 2 or not stored_row.runs(device):
        return False
    return stored_row.fits_rows(_form(outputs, inputs, dtype), rows, gated=gated) and _usable(device)


def rows_product(
    x: Tensor, weight: Tensor, *, gated: bool = False, add_to: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the product of 2 to 8 rows, contiguous and of the matrix's dtype; see `stored_row.rows_product`."""
    form = _form(weight.shape[0], weight.shape[1], weight.dtype)
    return stored_row.rows_product(x, weight, None, form, gated=gated, add_to=add_to, dtype=dtype)


def compile_rows_ahead(
    outputs: int, inputs: int, dtype: torch.dtype, rows: int, result: torch.dtype, *, gated: bool, added: bool
) -> None:
    """Compile the kernels for a matrix in the background."""
    wide = result == torch.float32
    row = RowForm(gated, normed=False, biased=False, added=added, x_float=False, out_float=wide)
    stored_row.compile_rows_ahead(_form(outputs, inputs, dtype), rows, row)


def compile_ahead(
    outputs: int, inputs: int, dtype: torch.dtype, row: RowForm, joined: JoinedCode | None = None
) -> None:
    """Compile the kernel for a matrix in the background."""
    stored_row.compile_ahead(_form(outputs, inputs, dtype), row, joined)


def _form(outputs: int, inputs: int, dtype: torch.dtype) -> StoredForm:
    return StoredForm(dtype, 0, dtype, outputs, inputs)
