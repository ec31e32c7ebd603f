"""Compile the kernels of additions in parallel, before steps are recorded, which would compile one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import torch

from octavo.device.ahead import Ahead, target_of
from octavo.features.lora import kernels
from octavo.features.lora.delta import LateDelta
from octavo.features.lora.gpu import LowRankDelta, SplitDelta
from octavo.features.lora.gpu_experts import KernelExperts
from octavo.models.feed_forwards.spec import experts_in
from octavo.models.spec import DecoderSpec
from octavo.nn.delta import Delta, ExpertsDelta
from octavo.nn.experts import ExpertLayer
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.linear import Linear, Projection
from octavo.nn.ops import gated_tiles, row16
from octavo.nn.ops.expert_products import route_on_device, typical_tokens
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.ops.ring import RowForm
from octavo.nn.ops.unfused_experts import mix_adding
from octavo.nn.shard import ROW

log = logging.getLogger(__name__)


@torch.inference_mode()
def compile_ahead(
    layers: Iterable[tuple[Projection, Delta | None]],
    experts: Iterable[tuple[ExpertLayer, ExpertsDelta | None]],
    spec: object,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compile the CUDA kernels, and what layers launch in Triton, for each shape once.

    Kernels missing here, such as those of quantized experts, are compiled at their first launch.

    Args:
        spec: of the model.
    """
    began = time.perf_counter()
    ahead = Ahead(target_of(device))
    one = torch.empty(16, dtype=dtype, device=device)
    added = [(layer, _of_tokens(delta)) for layer, delta in layers if isinstance(layer, Linear)]
    forms = {delta.form for _, deltas in added for delta in deltas}
    # Which numbers of rows need it is chosen later, and to load it while a step is recorded is not possible.
    alone = {form for form in forms if form.parts == 2} if gated_tiles.runs(device) else set()
    for form in forms:
        kernels.compile_ahead(form, alone=form in alone)
    with ahead.collecting():
        for layer, deltas in added:
            if len(deltas) == 1:  # several are not fused with the product of one row
                _launch(layer, deltas[0], one)
        for mixture, additions in {layer.form: additions for layer, additions in experts}.items():
            if isinstance(additions, KernelExperts):
                _launch_experts(mixture, additions, _top_k(spec), one)
    for form in alone:
        kernels.expand(form, alone=True)
    log.info("compiled or loaded %d kernels of adapters in %.1f s", ahead.wait(), time.perf_counter() - began)


def _of_tokens(delta: Delta | None) -> Sequence[LowRankDelta]:
    made = delta.tokens if isinstance(delta, LateDelta) else delta
    if isinstance(made, SplitDelta):
        return made.deltas
    return [made] if isinstance(made, LowRankDelta) else []


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


def _top_k(spec: object) -> int:
    mlps = spec.mlps if isinstance(spec, DecoderSpec) else ()
    return next((found.routing.top_k for mlp in mlps if (found := experts_in(mlp))), 1)


def _launch_experts(form: ExpertsForm, delta: KernelExperts, top_k: int, one: torch.Tensor) -> None:
    hidden, count, inner = form.hidden_size, len(form.owned), form.size * (2 if form.gated else 1)

    def matrices(*shape: int) -> torch.Tensor:
        return one[0].expand(count, *shape)  # without memory; not contiguous, so that no kernel in CUDA takes them

    first, second = (matrices(inner), matrices(hidden)) if form.bias else (None, None)
    stacked = StackedWeights(matrices(inner, hidden), matrices(hidden, form.size), first, second, form.owned.start)
    for tokens in typical_tokens(form, top_k):
        logits = torch.empty(tokens, form.num_experts, dtype=torch.float32, device=one.device)
        routing = route_on_device(logits, RoutingSpec(top_k=top_k))
        mix_adding(one.new_empty(tokens, hidden), routing, stacked, form, delta)
