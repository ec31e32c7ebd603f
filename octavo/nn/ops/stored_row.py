"""Products of up to 8 rows with a matrix of 8- or 16-bit numbers on a Hopper GPU, by the CUDA kernel
`cuda/stored_row.cu`.

A block for each multiprocessor copies numbers into shared memory far ahead of those that it multiplies, and the first
ones while the previous launch ends. So memory is read with fewer pauses than by kernels in Triton.
"""

from __future__ import annotations

import functools
from ctypes import Structure, c_float, c_int
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv
from octavo.nn.ops import nvrtc
from octavo.nn.ops.nvrtc import Argument, Kernel, address
from octavo.nn.ops.ring import (
    LEAST_DEPTH,
    MOST_INPUTS,
    MOST_ROWS,
    PARTS,
    SHARED,
    STRIP,
    WARPS,
    RingPlan,
    RowForm,
    beside_rows,
    blocks_of,
    columns_for,
    form_of_part,
    rows_alone,
)

_FORMS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2, torch.bfloat16: 3, torch.float16: 3}
_STEP_BYTES = STRIP * 64
_SPAN_BYTES = WARPS * _STEP_BYTES
"""Of all warps' steps of one matrix."""
_APART_BYTES = {2: 64, 1: 16}
"""Bytes of a number -> bytes between several rows, so that threads read different banks."""
_TILE = 128
MOST_STRIPS = 64
"""Of a block, for which there is room where something is joined."""


class StoredForm(NamedTuple):
    """A matrix, for which a kernel is compiled.

    Attributes:
        codes: dtype of its numbers.
        tile: outputs and inputs that share a scale; 0 if an output has one, or there are none.
        narrow: the 16-bit dtype of the norm's weights, of the bias, and of x and the result if they are not float32.
        parts: launches that multiply several rows, each some of the inputs.
    """

    codes: torch.dtype
    tile: int
    narrow: torch.dtype
    outputs: int
    inputs: int
    parts: int = 1


class JoinedCode(NamedTuple):
    """A source that defines the structs `Joined` and `Given` of `cuda/stored_row.cu` for the narrow dtype, and its
    macros."""

    source: str
    macros: tuple[tuple[str, int], ...]


class Joined(NamedTuple):
    """What is added to the product of one row in its launch, before the operations after it.

    Attributes:
        given: what the kernel gets as `Given`.
    """

    code: JoinedCode
    given: Structure


def fits(outputs: int, inputs: int, codes: torch.dtype, *, tile: int = 0, gated: bool) -> bool:
    """Return whether the kernel supports a matrix."""
    parts = 2 if gated else 1
    if outputs % (STRIP * parts) or (tile and outputs % (_TILE * parts)):
        return False
    return inputs % (64 // codes.itemsize) == 0 and inputs <= MOST_INPUTS


def runs(device: torch.device) -> bool:
    """Return whether a device is one that the kernel is made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def joins(outputs: int, device: torch.device, *, gated: bool) -> bool:
    """Return whether `product` supports `joined` for a matrix with this many outputs."""
    own = outputs // 2 if gated else outputs
    return own // STRIP <= MOST_STRIPS * blocks_of(own, device)


def product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    form: StoredForm,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    plan: RingPlan | None = None,
    joined: Joined | None = None,
) -> Tensor:
    """Return the product of one row; see `few_rows.fused_product`.

    Args:
        plan: None for the one of `ring_plan`.
    """
    outputs = form.outputs // 2 if gated else form.outputs
    out = add_to
    if out is None:
        out = torch.empty(1, outputs, dtype=dtype or form.narrow, device=x.device)
    scale, eps = norm if norm is not None else (x, 0.0)
    row = RowForm(
        gated=gated,
        normed=norm is not None,
        biased=bias is not None,
        added=add_to is not None,
        x_float=x.dtype == torch.float32,
        out_float=out.dtype == torch.float32,
    )
    _launch(form, row, plan or ring_plan(form), x, scale, codes, scales, bias, out, eps, joined)
    return out


def rows_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    form: StoredForm,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of several rows x [M, K], contiguous, of the narrow dtype, that `fits_rows` accepts: [M, N],
    of `dtype` or the narrow one. Other arguments are those of `few_rows.fused_product`.

    If the rows don't fit in shared memory, several launches multiply a part of the inputs each, and add to the first
    one's rounded result.
    """
    count, outputs = x.shape[0], form.outputs // 2 if gated else form.outputs
    out = add_to
    if out is None:
        out = torch.empty(count, outputs, dtype=dtype or form.narrow, device=x.device)
    form = rows_form(form, count, gated=gated)
    inputs = form.inputs // form.parts
    for part in range(form.parts):
        own = slice(part * inputs, (part + 1) * inputs)
        row = form_of_part(part, count, out, bias, add_to, gated=gated)
        of_part = scales
        if scales is not None and form.tile:
            of_part = scales[:, own.start // form.tile :]
        _launch(form, row, _rows_plan(form, row), x[:, own], x, codes[:, own], of_part, bias, out, 0.0)
    return out


def _launch(
    form: StoredForm,
    row: RowForm,
    plan: RingPlan | None,
    x: Tensor,
    norm: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    joined: Joined | None = None,
) -> None:
    assert plan is not None, "x fits in shared memory"
    tensors = [x, norm, codes, codes if scales is None else scales, x if bias is None else bias, out]
    given: list[Argument] = [*map(address, tensors), c_float(eps), c_int(x.shape[0])]
    given.append(address(x) if joined is None else joined.given)
    kernel = _kernel(form, row, plan, None if joined is None else joined.code)
    kernel.launch((blocks_of(out.shape[1], x.device), 1, 1), given)


def compile_ahead(form: StoredForm, row: RowForm, joined: JoinedCode | None = None) -> None:
    """Compile the kernel for a matrix in the background."""
    source, macros, _, _ = source_of(form, row, ring_plan(form), joined)
    nvrtc.compile_ahead(source, macros)


def compile_rows_ahead(form: StoredForm, rows: int, fused: RowForm) -> None:
    """Compile the kernels for several rows in the background."""
    form, columns = rows_form(form, rows, gated=fused.gated), columns_for(rows)
    for added in {fused.added, fused.added or form.parts > 1}:
        row = fused._replace(added=added, rows=columns)
        plan = _rows_plan(form, row)
        assert plan is not None, "x fits in shared memory"
        source, macros, _, _ = source_of(form, row, plan)
        nvrtc.compile_ahead(source, macros)


def ring_plan(form: StoredForm) -> RingPlan:
    """Return the fastest division, as measured on an H200: a block fills a multiprocessor's shared memory. With two
    smaller ones, of this launch and the next, a whole model is slower."""
    return RingPlan(WARPS, 2, SHARED)


def fits_rows(form: StoredForm, rows: int, *, gated: bool) -> bool:
    """Return whether the kernel supports this number of rows, and they fit in shared memory."""
    if not 1 < rows <= MOST_ROWS or not fits(form.outputs, form.inputs, form.codes, tile=form.tile, gated=gated):
        return False
    return _rows_plan(rows_form(form, rows, gated=gated), rows_alone(rows, gated=gated)) is not None


def rows_form(form: StoredForm, rows: int, *, gated: bool) -> StoredForm:
    """Return the form with as few parts as rows need; parts of gated products can't be added."""
    row, unit = rows_alone(rows, gated=gated), max(form.tile, 64)
    divided = (form._replace(parts=parts) for parts in ((1,) if gated else PARTS) if form.inputs % (parts * unit) == 0)
    return next((one for one in divided if _rows_plan(one, row) is not None), form)


@functools.cache
def _rows_plan(form: StoredForm, row: RowForm) -> RingPlan | None:
    """Return the division for several rows; None if there is no room for a ring beside them."""
    return beside_rows(SHARED - _row_bytes(form, row), lambda span: span * _SPAN_BYTES * row.sides)


def _row_bytes(form: StoredForm, row: RowForm) -> int:
    """Return the bytes of x in shared memory; one that is not narrow yet takes two narrow ones. Several are apart, and
    their sums count, too."""
    if row.rows > 1:
        return row.rows * (2 * (form.inputs // form.parts) + _APART_BYTES[form.codes.itemsize]) + row.sum_bytes
    splits = form.codes.itemsize == 2 and (row.normed or row.x_float)
    return 2 * form.inputs * (2 if splits else 1)


@functools.cache
def _kernel(form: StoredForm, row: RowForm, plan: RingPlan, joined: JoinedCode | None = None) -> Kernel:
    return Kernel("stored_row", *source_of(form, row, plan, joined))


def source_of(
    form: StoredForm, row: RowForm, plan: RingPlan, joined: JoinedCode | None = None
) -> tuple[str, dict[str, int], int, int]:
    """Return source, macros, threads and bytes of shared memory."""
    more = joined or JoinedCode("", ())
    spans, own = plan.warps * plan.span * _STEP_BYTES * row.sides, _row_bytes(form, row)
    depth = max(LEAST_DEPTH, (plan.shared - own) // spans)
    if row.rows > 1:
        own -= row.sum_bytes  # the kernel has them beside
    macros = {
        "FORM": _FORMS[form.codes],
        "TILED": int(form.tile > 0),
        "STRIDE": cdiv(form.inputs, 4 * _TILE) * 4,
    }
    macros |= {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(form.narrow == torch.float16)}
    macros |= {
        "N": form.outputs,
        "K": form.inputs // form.parts,
        "LINE": form.inputs,
        "WARPS": plan.warps,
        "SPAN": plan.span,
        "DEPTH": depth,
    }
    macros |= row.macros() | {"JOINS": int(joined is not None), "MOST_STRIPS": MOST_STRIPS} | dict(more.macros)
    source = nvrtc.source_of("integers.cuh", "copies.cuh", "row.cuh") + more.source + nvrtc.source_of("stored_row.cu")
    return source, macros, 32 * plan.warps, depth * spans + own
