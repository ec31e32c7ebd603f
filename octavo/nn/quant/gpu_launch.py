"""Launch the kernels of plain matrices on a GPU before the weights are there, so that they are compiled ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.nn.ops import few_rows, row16, triton_activation
from octavo.nn.ops.one_row import takes_ring
from octavo.nn.ops.ring import RowForm


class RowNorm(NamedTuple):
    """An RMS norm of a product's input: the dtypes of the input and of the norm's weight."""

    dtype: torch.dtype
    scale: torch.dtype
    eps: float


class PlainForm(NamedTuple):
    """A layer with a plain matrix, and what can be fused with its products.

    Attributes:
        gates: the outputs are a SiLU gate and its operand.
        last: the outputs belong to the residual stream.
        added: the launch of one row adds them to the stream; that of more rows only if `last`.
        wide: the outputs are float32.
        norm: of the input; None for none that a launch can compute.
    """

    outputs: int
    inputs: int
    gates: bool
    last: bool
    added: bool
    wide: bool
    biased: bool
    norm: RowNorm | None


def launch(form: PlainForm, dtype: torch.dtype, residual: torch.dtype, device: torch.device) -> None:
    """Launch the kernels of few rows and of gates that a layer may need, with tensors that have no values.

    Args:
        dtype: of weights and activations.
        residual: dtype of the residual stream.
    """

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    weight = empty(form.outputs, form.inputs)
    bias = empty(form.outputs) if form.biased else None
    _launch_row(form, weight, bias, empty, residual)
    if form.gates:
        triton_activation.silu_mul(empty(2, form.outputs))
    if dtype.itemsize == 2 and not form.biased and not form.wide and few_rows.pays(2, form.outputs):
        added = empty(2, form.outputs) if form.last and form.added and residual == dtype else None
        few_rows.few_product(empty(2, form.inputs), weight, added)


def _launch_row(
    form: PlainForm, weight: Tensor, bias: Tensor | None, empty: Callable[..., Tensor], residual: torch.dtype
) -> None:
    """Launch the kernel of one row, or compile it in the background."""
    gated, norm = form.gates and not form.biased, None if form.added else form.norm
    x, kind = empty(1, form.inputs), None if norm is None else norm.scale
    fused: dict[str, bool] = {"gated": gated, "added": form.added}
    if takes_ring(form.outputs, form.inputs, weight.dtype, weight.device, scale=kind, **fused):
        row16.compile_ahead(form.outputs, form.inputs, weight.dtype, _row_form(form, residual, gated=gated))
    elif form.added:
        few_rows.fused_product(x, weight, add_to=empty(1, form.outputs, kind=residual), bias=bias)
    elif norm is not None:
        x, scale = empty(1, form.inputs, kind=norm.dtype), empty(form.inputs, kind=norm.scale)
        wide = torch.float32 if form.wide else None
        few_rows.fused_product(x, weight, norm=(scale, norm.eps), gated=gated, bias=bias, dtype=wide)
    elif not form.wide:
        few_rows.fused_product(x, weight, bias=bias, gated=gated)


def _row_form(form: PlainForm, residual: torch.dtype, *, gated: bool) -> RowForm:
    """Return what is fused with the product of one row."""
    wide = torch.float32
    return RowForm(
        gated=gated,
        normed=not form.added and form.norm is not None,
        biased=form.biased,
        added=form.added,
        x_float=not form.added and form.norm is not None and form.norm.dtype == wide,
        out_float=(form.added and residual == wide) or (not form.added and form.wide),
    )
