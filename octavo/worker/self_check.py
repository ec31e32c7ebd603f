"""Self-check: compare a few products of each form of packed weights with the checkpoint's, in float32, at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod

import torch
from torch import Tensor, nn

from octavo.core.errors import SelfCheckError
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import Model
from octavo.models.native import NativeDecoder
from octavo.nn.experts import ExpertLayer
from octavo.nn.linear import Projection
from octavo.nn.quant.base import Packing
from octavo.nn.quant.experts import ExpertsProduct
from octavo.nn.quant.packed import Matrix
from octavo.nn.shard import local_shape
from octavo.nn.weights import Index, Wanted, WeightLayer

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


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with packed weights.

    Attributes:
        form: how the weights are stored, for messages.
        wanted: their tensors in the checkpoint.
        multiply: x [T, in] float32 -> the product as it was loaded, [T, out] float32.
        is_rounded: the checkpoint's weights were rounded when they were packed.
    """

    form: str
    wanted: Sequence[Wanted]
    multiply: Callable[[Tensor], Tensor]
    is_rounded: bool = False

    @property
    def size(self) -> int:
        return sum(prod(local_shape(want.spec.shape, want.index)) for want in self.wanted)

    @property
    def limit(self) -> float:
        return _LIMIT_ROUNDED if self.is_rounded else _LIMIT


def check_products(model: Model, checkpoint: Checkpoint, *, everything: bool) -> None:
    """Check one product of each form, the smallest, and one of experts; log their number and the time.

    Args:
        model: with its weights, before features add to its layers.
        checkpoint: the same weights, in the model's names.
        everything: check products of any size.

    Raises:
        SelfCheckError: a product deviates.
    """
    began = time.perf_counter()
    found = _smallest_of_each_form(_products(model))
    chosen = {form: product for form, product in found.items() if everything or product.size <= AFFORDABLE}
    for product in chosen.values():
        deviation = _deviation(product, checkpoint)
        if not deviation <= product.limit:
            raise SelfCheckError(_failure(product, deviation))
    left_out = found.keys() - chosen.keys()
    if left_out:
        log.info("self-check: layers of %s are too large; --self-check checks them", ", ".join(sorted(left_out)))
    if chosen:
        seconds = time.perf_counter() - began
        log.info("self-check: %d forms of weights (%s), %.2f s", len(chosen), "; ".join(chosen), seconds)


def _products(model: Model) -> Iterator[_Product]:
    """Yield the products whose weights are packed, and of each layer's experts one for each form."""
    source = model.source if isinstance(model, NativeDecoder) else model
    assert isinstance(source, nn.Module)
    for layer in source.modules():
        if isinstance(layer, WeightLayer) and layer.offloaded:
            continue
        if isinstance(layer, Projection) and layer.packed_as is not None:
            yield _product_of(model, layer, layer.packed_as)
        elif isinstance(layer, ExpertLayer) and isinstance(model, NativeDecoder):
            yield from _of_native_experts(model, layer)
        elif isinstance(layer, ExpertLayer):
            for matrices, wanted in layer.packed_on_gpu:
                multiply = partial(_by_kernel, matrices)
                yield _Product(f"{matrices.packed_as} of experts", wanted, multiply, matrices.is_rounded)


def _of_native_experts(model: NativeDecoder, layer: ExpertLayer) -> Iterator[_Product]:
    seen: set[tuple[str, bool]] = set()
    for matrix, paired, wanted in layer.packed_products:
        if (matrix.form, paired) not in seen:
            seen.add((matrix.form, paired))
            yield _Product(f"{matrix.form} of experts", wanted, _by_program(model, matrix, paired=paired))


def _product_of(model: Model, layer: Projection, form: str) -> _Product:
    wanted = layer.wanted() if layer.source is None else layer.source.wanted()
    if isinstance(model, NativeDecoder):
        return _Product(form, wanted, _by_program(model, layer.matrix, paired=layer.gates))
    scheme = layer.scheme
    assert isinstance(scheme, Packing), "only forms of a scheme's own are checked"
    return _Product(
        form, wanted, lambda x: scheme.wide(x.to(layer.device, scheme.dtype)).float().cpu(), scheme.is_rounded
    )


def _by_kernel(matrices: ExpertsProduct, x: Tensor) -> Tensor:
    return matrices.multiply(0, x).float().cpu()


def _by_program(model: NativeDecoder, matrix: Matrix, *, paired: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: model.product(matrix, x, paired=paired)


def _smallest_of_each_form(products: Iterable[_Product]) -> dict[str, _Product]:
    found: dict[str, _Product] = {}
    for product in products:
        if product.form not in found or product.size < found[product.form].size:
            found[product.form] = product
    return found


def _deviation(product: _Product, checkpoint: Checkpoint) -> float:
    """Return the largest deviation of an output, of the norm of its weights."""
    weights, places = _stored(product, checkpoint, ".weight")
    biases, _ = _stored(product, checkpoint, ".bias")
    x = torch.randn(max(_ROWS), weights.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.bfloat16().float()  # exact in every dtype of activations
    expected = x @ weights.T + (biases if biases.numel() else 0)
    norms = weights.norm(dim=1)
    norms = norms.clamp_min(1e-3 * float(norms.mean()))
    worst = 0.0
    for rows in _ROWS:
        off = (product.multiply(x[:rows])[:, places] - expected[:rows]).square().mean(0).sqrt() / norms
        worst = max(worst, float(off.max().nan_to_num(inf)))
    return worst


def _stored(product: _Product, checkpoint: Checkpoint, suffix: str) -> tuple[Tensor, Tensor]:
    """Return the first outputs of each projection's tensors of a suffix, in float32, and their places among all."""
    tensors, places, first = [], [], 0
    for want in product.wanted:
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


def _failure(product: _Product, deviation: float) -> str:
    names = ", ".join(want.name for want in product.wanted if want.name.endswith(".weight"))
    return (
        f"Self-check: the products of {names}, stored as {product.form}, deviate from those of the dequantized weights "
        f"by {deviation:.2g} of the weights' norm, more than {product.limit}. The kernels are wrong on this machine, "
        "or the files changed while they were read. Use --dtype float32 or bfloat16, which dequantizes weights when "
        "they are loaded, and report this message; --no-self-check starts with these kernels."
    )
