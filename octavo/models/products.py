"""Choose algorithms for all matrix products of a model on a GPU before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from octavo.models.decoder import CausalLM, DecoderLayer
from octavo.models.feed_forwards.experts import Experts
from octavo.models.model import LayeredModel, Model
from octavo.nn.linear import Linear, Projection
from octavo.nn.ops import products
from octavo.nn.quant.gpu import OnGpu
from octavo.nn.quant.packed_gpu import PackedOnGpu

_LIKE = 4


def choose_products(model: Model, rows: Iterable[int], wait: Callable[[], None]) -> Collection[int]:
    """Choose algorithms for all linear layers and these numbers of rows.

    Args:
        wait: waits until Octavo's own kernels are compiled; always called once.

    Returns:
        The numbers of rows whose products are chosen and loaded.
    """
    wanted = sorted({count for count in rows if count > OnGpu.fused_rows})
    groups = _groups(model)
    products.choose(groups, wanted, wait)
    return wanted if groups and not _is_packed(model) else ()


def _is_packed(model: Model) -> bool:
    """Return whether some products are run by kernels that are loaded when they are first launched."""
    layers = model.modules() if isinstance(model, CausalLM) else ()
    return any(isinstance(layer, Projection) and getattr(layer.scheme, "is_packed", False) for layer in layers)


def launch_packed(model: LayeredModel) -> None:
    """Launch the kernels of layers whose weights will be quantized when they are loaded, with matrices of zeros: for
    compiling them ahead."""
    last = {layer for block in model.modules() if isinstance(block, DecoderLayer) for layer in block.outputs}
    shapes = set()
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.scheme, PackedOnGpu):
            shape = (sum(layer.sizes), layer.parts[0].in_features, layer.gates, layer in last, layer.has_bias)
            if shape not in shapes:
                shapes.add(shape)
                layer.scheme.launch(*shape, model.residual_dtype)


def _groups(model: Model) -> list[products.Like]:
    """Return groups of like matrices; [] if some products are not run by the library."""
    if not isinstance(model, CausalLM) or products.products() is None:
        return []
    groups: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    blocks = [block for block in model.layers if isinstance(block, DecoderLayer)]
    last = {layer for block in blocks for layer in block.outputs}
    added: set[torch.Size] = set()
    gated: set[torch.Size] = set()
    wide = {getattr(model, "head", None), *(one.router for one in model.modules() if isinstance(one, Experts))}
    for module in model.modules():
        if isinstance(module, Projection) and isinstance(module.scheme, OnGpu):
            weight = module.scheme.multiplied
            if weight is None and module.scheme.is_packed:
                continue
            if weight is None or weight.dtype.itemsize != 2 or module.scheme.bias is not None:
                return []
            like = groups.setdefault((weight.shape, torch.float32 if module in wide else weight.dtype), [])
            if len(like) < _LIKE:
                like.append(weight)
            if module.scheme.is_packed:
                continue
            if module in last and module.leaves(model.residual_dtype):
                added.add(weight.shape)
            if module.gates and module.activation == "silu":
                gated.add(weight.shape)
    return [products.Like(like, dtype, shape in added, shape in gated) for (shape, dtype), like in groups.items()]
