"""Products of 2 to 8 rows with `Fragments` on a Hopper GPU, by the CUDA kernel of one row, `cuda/row.cu`.

Blocks that stay on their multiprocessors and copy far ahead read memory with fewer pauses than those of `cuda/rows.cu`,
which pass many rows to the matrix units.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int

import torch
from torch import Tensor

from octavo.nn.ops import nvrtc
from octavo.nn.ops.fragments import (
    OUTPUTS,
    Form,
    Fragments,
    book_of,
    form_of,
    ring_plan,
    row_bytes,
    row_source,
    span_bytes,
)
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.ops.ring import (
    COLUMNS,
    MOST_ROWS,
    PARTS,
    SHARED,
    WARPS,
    RingPlan,
    RowForm,
    beside_rows,
    blocks_of,
    columns_for,
    form_of_part,
    rows_alone,
)


def serves(matrix: Fragments, rows: int, dtype: torch.dtype, *, gated: bool = False) -> bool:
    """Return whether `product` supports this number of rows of this dtype."""
    if dtype.itemsize != 2 or not 1 < rows <= MOST_ROWS:
        return False
    return _division(form_of(matrix), matrix.inputs, rows, gated=gated) is not None


def product(
    x: Tensor,
    matrix: Fragments,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of several rows x [M, K] that `serves` accepts: [M, N], of `dtype` or x's. Arguments are those
    of `few_rows.fused_product`; x is contiguous, in the matrix's order of inputs.

    If the rows don't fit in shared memory, several launches multiply a part of the inputs each, and add to the first
    one's rounded result.
    """
    rows, outputs = x.shape[0], matrix.outputs // 2 if gated else matrix.outputs
    out = add_to
    if out is None:
        out = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
    form = form_of(matrix)
    division = _division(form, matrix.inputs, rows, gated=gated)
    assert division is not None, "the rows fit in shared memory"
    parts, plan = division
    of_scales = matrix.scales.shape[1] // parts if form.group else 0
    for part in range(parts):
        fused = form_of_part(part, rows, out, bias, add_to, gated=gated)
        begin = part * matrix.inputs // parts
        _kernel(form, x.dtype, matrix.outputs, matrix.inputs, fused, plan, parts).launch(
            (blocks_of(outputs, x.device), 1, 1),
            [
                address(x[:, begin:]),
                address(x),
                address(matrix.codes[:, begin // OUTPUTS :]),
                address(matrix.scales[:, part * of_scales :]),
                address(x if bias is None else bias),
                address(out),
                c_float(0.0),
                c_int(rows),
                book_of(matrix),
            ],
        )
    return out


def compile_ahead(matrix: Fragments, dtype: torch.dtype, only: int | None = None) -> None:
    """Compile the kernels for a matrix in the background: for all that may be fused with the product, or for one number
    of rows with nothing fused."""
    form = form_of(matrix)
    for rows in COLUMNS if only is None else (columns_for(only),):
        for gated, added in ((False, False), (False, True), (True, False)) if only is None else ((False, False),):
            division = _division(form, matrix.inputs, rows, gated=gated)
            if division is None:
                continue
            parts, plan = division
            fused = rows_alone(rows, gated=gated)._replace(added=added, out_float=only is not None)
            source, macros, _, _ = row_source(form, dtype, matrix.outputs, matrix.inputs, fused, plan, parts)
            nvrtc.compile_ahead(source, macros)


@functools.cache
def _division(form: Form, inputs: int, rows: int, *, gated: bool) -> tuple[int, RingPlan] | None:
    """Return in how many parts of the inputs to multiply, and how a block copies the matrix; None if the rows don't
    fit. Parts of gated products can't be added."""
    fused, unit = rows_alone(rows, gated=gated), max(form.group, OUTPUTS)
    longest = ring_plan(form, gated=gated).span
    for parts in (1,) if gated else PARTS:
        if inputs % (parts * unit) and parts > 1:
            continue
        room = SHARED - row_bytes(form, inputs // parts, fused)
        plan = beside_rows(room, lambda span: WARPS * span_bytes(form, fused, span), longest)
        if plan is not None:
            return parts, plan
    return None


@functools.cache
def _kernel(
    form: Form, dtype: torch.dtype, outputs: int, inputs: int, fused: RowForm, plan: RingPlan, parts: int
) -> Kernel:
    return Kernel("row", *row_source(form, dtype, outputs, inputs, fused, plan, parts))
