"""Launch the kernels of plain matrices on a GPU before the weights are there, so that they are compiled ahead."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.nn.ops import few_rows, gating, triton_activation


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
    if form.added:
        few_rows.fused_product(empty(1, form.inputs), weight, add_to=empty(1, form.outputs, kind=residual), bias=bias)
    elif form.norm is not None:
        x, scale = empty(1, form.inputs, kind=form.norm.dtype), empty(form.inputs, kind=form.norm.scale)
        gated, wide = form.gates and not form.biased, torch.float32 if form.wide else None
        few_rows.fused_product(x, weight, norm=(scale, form.norm.eps), gated=gated, bias=bias, dtype=wide)
    if form.gates:
        triton_activation.silu_mul(empty(2, form.outputs))
    if dtype.itemsize == 2 and not form.biased:
        if not form.wide and few_rows.pays(2, form.outputs):
            added = empty(2, form.outputs) if form.last and form.added and residual == dtype else None
            few_rows.few_product(empty(2, form.inputs), weight, added)
        if form.gates and gating.serves(gating.TYPICAL, weight):
            gating.gated_product(empty(gating.TYPICAL, form.inputs), weight)
