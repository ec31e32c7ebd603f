"""Products of one row with a matrix of 8- or 16-bit numbers on a Hopper GPU, by the CUDA kernel `cuda/stored_row.cu`.

A block for each multiprocessor copies numbers into shared memory far ahead of those that it multiplies, and the first
ones while the previous launch ends. So memory is read with fewer pauses than by kernels in Triton.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_void_p
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from octavo.nn.ops import nvrtc
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.ops.ring import LEAST_DEPTH, MOST_INPUTS, SHARED, STRIP, RingPlan, RowForm, blocks_of

_FORMS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2, torch.bfloat16: 3, torch.float16: 3}
_STEP_BYTES = STRIP * 64
_TILE = 128


class StoredForm(NamedTuple):
    """A matrix, for which a kernel is compiled.

    Attributes:
        codes: dtype of its numbers.
        tile: outputs and inputs that share a scale; 0 if an output has one, or there are none.
        narrow: the 16-bit dtype of the norm's weights, of the bias, and of x and the result if they are not float32.
    """

    codes: torch.dtype
    tile: int
    narrow: torch.dtype
    outputs: int
    inputs: int


def fits(outputs: int, inputs: int, codes: torch.dtype, *, tile: int = 0, gated: bool) -> bool:
    """Return whether the kernel supports a matrix."""
    parts = 2 if gated else 1
    if outputs % (STRIP * parts) or (tile and outputs % (_TILE * parts)):
        return False
    return inputs % (64 // codes.itemsize) == 0 and inputs <= MOST_INPUTS


def runs(device: torch.device) -> bool:
    """Return whether a device is one that the kernel is made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


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
    arguments = [address(x), address(scale), address(codes)]
    arguments += [address(codes if scales is None else scales), address(x if bias is None else bias), address(out)]
    grid = blocks_of(outputs, x.device), 1, 1
    given: list[c_void_p | c_float] = [*arguments, c_float(eps)]
    _kernel(form, row, plan or ring_plan(form)).launch(grid, given)
    return out


def compile_ahead(form: StoredForm, row: RowForm) -> None:
    """Compile the kernel for a matrix in the background."""
    source, macros, _, _ = source_of(form, row, ring_plan(form))
    nvrtc.compile_ahead(source, macros)


def ring_plan(form: StoredForm) -> RingPlan:
    """Return the fastest division, as measured on an H200: a block fills a multiprocessor's shared memory. With two
    smaller ones, of this launch and the next, a whole model is slower."""
    return RingPlan(16, 2, SHARED)


def _row_bytes(form: StoredForm, row: RowForm) -> int:
    """Return the bytes of x in shared memory; one that is not narrow yet takes two narrow ones."""
    splits = form.codes.itemsize == 2 and (row.normed or row.x_float)
    return 2 * form.inputs * (2 if splits else 1)


@functools.cache
def _kernel(form: StoredForm, row: RowForm, plan: RingPlan) -> Kernel:
    return Kernel("stored_row", *source_of(form, row, plan))


def source_of(form: StoredForm, row: RowForm, plan: RingPlan) -> tuple[str, dict[str, int], int, int]:
    """Return source, macros, threads and bytes of shared memory."""
    spans, own = plan.warps * plan.span * _STEP_BYTES * row.sides, _row_bytes(form, row)
    depth = max(LEAST_DEPTH, (plan.shared - own) // spans)
    macros = {
        "FORM": _FORMS[form.codes],
        "TILED": int(form.tile > 0),
        "STRIDE": triton.cdiv(form.inputs, 4 * _TILE) * 4,
    }
    macros |= {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(form.narrow == torch.float16)}
    macros |= {"N": form.outputs, "K": form.inputs, "WARPS": plan.warps, "SPAN": plan.span, "DEPTH": depth}
    macros |= row.macros()
    return nvrtc.source_of("integers.cuh", "row.cuh", "stored_row.cu"), macros, 32 * plan.warps, depth * spans + own
