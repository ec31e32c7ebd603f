"""Self-check: compare a few products of each form of packed weights with the checkpoint's, in float32, at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf, prod

import torch
from torch import Tensor, nn

from octavo.core.errors import SelfCheckError
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import Model
from octavo.models.native import NativeDecoder
from octavo.nn.linear import Projection
from octavo.nn.quant.base import Packing
from octavo.nn.shard import local_shape
from octavo.nn.weights import Index, Wanted

log = logging.getLogger(__name__)

AFFORDABLE = 1 << 25
"""Weights of the largest layer that is checked unless all are to be: it takes up to 0.2 s on two cores."""
_ROWS = (1, 16)
"""Numbers of rows that are multiplied: few and many rows have different kernels."""
_OUTPUTS = 256
"""Outputs of each projection that are compared."""
_LIMIT, _LIMIT_ROUNDED = 0.05, 0.5
"""Largest deviation of an output, of the norm of its weights: of rounded activations, and of weights that were rounded
to 4 bits when they were loaded. Wrong scales or values give 1 and more."""


def check_products(model: Model, checkpoint: Checkpoint, *, everything: bool) -> None:
    """Check one layer of each form, the smallest; log their number and the time.

    Args:
        model: with its weights, before features add to its layers.
        checkpoint: the same weights, in the model's names.
        everything: check layers of any size.

    Raises:
        SelfCheckError: the products of a layer deviate.
    """
    began = time.perf_counter()
    source = model.source if isinstance(model, NativeDecoder) else model
    assert isinstance(source, nn.Module)
    found = _smallest_of_each_form(one for one in source.modules() if isinstance(one, Projection))
    chosen = {form: layer for form, layer in found.items() if everything or _size(layer) <= AFFORDABLE}
    for form, layer in chosen.items():
        deviation, limit = _deviation(model, layer, checkpoint), _limit(layer)
        if not deviation <= limit:
            raise SelfCheckError(_failure(layer, form, deviation, limit))
    left_out = found.keys() - chosen.keys()
    if left_out:
        log.info("self-check: layers of %s are too large; --self-check checks them", ", ".join(sorted(left_out)))
    seconds = time.perf_counter() - began
    log.info("self-check: %d forms of weights (%s), %.2f s", len(chosen), "; ".join(chosen), seconds)


def _smallest_of_each_form(layers: Iterable[Projection]) -> dict[str, Projection]:
    found: dict[str, Projection] = {}
    for layer in layers:
        form = layer.packed_as
        if form is not None and (form not in found or _size(layer) < _size(found[form])):
            found[form] = layer
    return found


def _wanted(layer: Projection) -> Sequence[Wanted]:
    """Return the layer's tensors, or those of the layer whose table it shares."""
    return layer.wanted() if layer.source is None else layer.source.wanted()


def _size(layer: Projection) -> int:
    return sum(prod(local_shape(want.spec.shape, want.index)) for want in _wanted(layer))


def _deviation(model: Model, layer: Projection, checkpoint: Checkpoint) -> float:
    """Return the largest deviation of an output, of the norm of its weights."""
    weights, places = _stored(layer, checkpoint, ".weight")
    biases, _ = _stored(layer, checkpoint, ".bias")
    x = torch.randn(max(_ROWS), weights.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.bfloat16().float()  # exact in every dtype of activations
    expected = x @ weights.T + (biases if biases.numel() else 0)
    norms = weights.norm(dim=1)
    norms = norms.clamp_min(1e-3 * float(norms.mean()))
    multiply = _product(model, layer)
    worst = 0.0
    for rows in _ROWS:
        off = (multiply(x[:rows])[:, places] - expected[:rows]).square().mean(0).sqrt() / norms
        worst = max(worst, float(off.max().nan_to_num(inf)))
    return worst


def _stored(layer: Projection, checkpoint: Checkpoint, suffix: str) -> tuple[Tensor, Tensor]:
    """Return the first outputs of each projection's tensors of a suffix, in float32, and their places among all."""
    tensors, places, first = [], [], 0
    for want in _wanted(layer):
        if not want.name.endswith(suffix):
            continue
        shape = local_shape(want.spec.shape, want.index)
        index = _first_outputs(want)
        tensors.append(checkpoint.tensor(want.name, replace(want.spec, dtype=torch.float32), index).float())
        places.append(first + torch.arange(len(tensors[-1])))
        first += shape[0]
    if not tensors:
        return torch.empty(0), torch.empty(0)
    return torch.cat(tensors), torch.cat(places)


def _first_outputs(want: Wanted) -> Index:
    own = want.index or tuple(slice(0, size) for size in want.spec.shape)
    begin, end, _ = own[0].indices(want.spec.shape[0])
    return (slice(begin, min(end, begin + _OUTPUTS)), *own[1:])


def _product(model: Model, layer: Projection) -> Callable[[Tensor], Tensor]:
    """Return x [T, in] float32 -> the layer's product as it was loaded, [T, out] float32."""
    if isinstance(model, NativeDecoder):
        return lambda x: model.product(layer, x)
    scheme = layer.scheme
    assert isinstance(scheme, Packing), "only forms of a scheme's own are checked"
    return lambda x: scheme.wide(x.to(layer.device, scheme.dtype)).float().cpu()


def _limit(layer: Projection) -> float:
    return _LIMIT_ROUNDED if isinstance(layer.scheme, Packing) and layer.scheme.is_rounded else _LIMIT


def _failure(layer: Projection, form: str, deviation: float, limit: float) -> str:
    names = ", ".join(want.name for want in _wanted(layer) if want.name.endswith(".weight"))
    return (
        f"Self-check: the products of {names}, stored as {form}, deviate from those of the dequantized weights by "
        f"{deviation:.2g} of the weights' norm, more than {limit}. The kernels are wrong on this machine, or the files "
        "changed while they were read. Use --dtype float32 or bfloat16, which dequantizes weights when they are "
        "loaded, and report this message; --no-self-check starts with these kernels."
    )
