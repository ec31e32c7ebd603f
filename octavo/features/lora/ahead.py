"""Compile the kernels of additions in parallel, before steps are recorded, which would compile one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import torch

from octavo.device.ahead import Ahead, target_of
from octavo.features.lora import kernels
from octavo.features.lora.delta import LateDelta
from octavo.features.lora.gpu import LowRankDelta
from octavo.nn.delta import Delta
from octavo.nn.linear import Linear, Projection
from octavo.nn.ops import row16
from octavo.nn.ops.ring import RowForm
from octavo.nn.shard import ROW

log = logging.getLogger(__name__)


@torch.inference_mode()
def compile_ahead(layers: Iterable[tuple[Projection, Delta | None]], dtype: torch.dtype, device: torch.device) -> None:
    """Compile the CUDA kernels, and what layers launch in Triton, for each shape once.

    Kernels missing here are compiled at their first launch, so the forms need not be complete.
    """
    began = time.perf_counter()
    ahead = Ahead(target_of(device))
    one = torch.empty(16, dtype=dtype, device=device)
    added = [(layer, _of_tokens(delta)) for layer, delta in layers if isinstance(layer, Linear)]
    for form in {delta.form for _, delta in added if delta is not None}:
        kernels.compile_ahead(form)
    with ahead.collecting():
        for layer, delta in added:
            if delta is not None:
                _launch(layer, delta, one)
    log.info("compiled or loaded %d kernels of adapters in %.1f s", ahead.wait(), time.perf_counter() - began)


def _of_tokens(delta: Delta | None) -> LowRankDelta | None:
    made = delta.tokens if isinstance(delta, LateDelta) else delta
    return made if isinstance(made, LowRankDelta) else None


def _launch(layer: Linear, delta: LowRankDelta, one: torch.Tensor) -> None:
    inputs = layer.parts[0].in_features if (own := layer.cuts[0].inputs) is None else len(own)
    outputs = sum(layer.sizes)
    gated, dtype = layer.gates and layer.activation == "silu", one.dtype

    def empty(*shape: int) -> torch.Tensor:
        return one[:1].expand(shape)  # of the right size, without memory

    weight, added = empty(outputs, inputs), layer.shard is ROW
    if delta.joins(weight, None if added else dtype, gated=gated, added=added):
        wide = not (added or gated)
        row = RowForm(gated, not added, layer.has_bias, added, x_float=False, out_float=wide)
        row16.compile_ahead(outputs, inputs, dtype, row, kernels.row_addition(delta.form))
        return
    bias = empty(outputs) if layer.has_bias else None
    if added:
        delta.fused(empty(1, inputs), weight, bias=bias, add_to=empty(1, outputs))
    else:
        norm = empty(inputs), 1e-5
        delta.fused(empty(1, inputs), weight, bias=bias, norm=norm, gated=gated)
