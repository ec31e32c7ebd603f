"""Choose algorithms for all matrix products of a model on a GPU before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.models.decoder import CausalLM, DecoderLayer
from octavo.models.feed_forwards.experts import Experts
from octavo.models.model import LayeredModel, Model
from octavo.models.spec import DecoderSpec
from octavo.nn.embedding import TiedHead
from octavo.nn.linear import Linear, Projection
from octavo.nn.ops import ordered, products
from octavo.nn.quant.gpu import OnGpu
from octavo.nn.quant.gpu_launch import PlainForm, RowNorm, launch
from octavo.nn.quant.ordered import Ordered
from octavo.nn.quant.packed_gpu import PackedOnGpu

_LIKE = 4


def choose_products(model: Model, rows: Iterable[int], wait: Callable[[], None]) -> Collection[int]:
    """Choose algorithms for all linear layers and these numbers of rows.

    Args:
        wait: waits until Octavo's own kernels are compiled; always called once.

    Returns:
        The numbers of rows whose products are chosen and loaded.
    """
    if ordered_groups := _ordered_groups(model):
        every = sorted(set(rows))
        ordered.choose(ordered_groups, every, wait)
        return every
    wanted = sorted({count for count in rows if count > OnGpu.fused_rows})
    groups = _groups(model)
    products.choose(groups, wanted, wait)
    return wanted if groups and not _is_packed(model) else ()


def _is_packed(model: Model) -> bool:
    """Return whether some products are run by kernels that are loaded when they are first launched."""
    layers = model.modules() if isinstance(model, CausalLM) else ()
    return any(isinstance(layer, Projection) and getattr(layer.scheme, "is_packed", False) for layer in layers)


def launch_plain(model: LayeredModel) -> None:
    """Launch the kernels that multiply few rows with the model's plain matrices, and those of gates, with tensors that
    have no values: for compiling them ahead."""
    if not isinstance(model, CausalLM):
        return
    last, added, wide, settled = _outputs(model), _added(model), _wide(model), _settled(model)
    layers = [one for one in model.modules() if isinstance(one, Projection) and isinstance(one.scheme, OnGpu)]
    dtype = next((one.scheme.dtype for one in layers if isinstance(one.scheme, OnGpu)), None)
    if dtype is None:
        return
    forms = [
        PlainForm(
            *_shape(layer, model.spec),
            _gates(layer),
            layer in last and layer.is_whole,
            layer in added and layer.is_whole,
            layer in wide,
            layer.has_bias,
            _norm(model, _shape(layer, model.spec)[1], dtype) if layer in settled and layer not in last else None,
        )
        for layer in layers
    ]
    behind_sums = [form._replace(norm=None) for layer, form in zip(layers, forms, strict=True) if layer.mesh.size > 1]
    for form in dict.fromkeys([*forms, *behind_sums]):
        launch(form, dtype, model.residual_dtype, model.device)


def _settled(model: CausalLM) -> set[Any]:
    """Return the layers whose input stream may have no pending addition, so that they can normalize it themselves.
    Elsewhere on ranks, the launch that adds up the ranks' outputs computes the norm."""
    first = set(model.layers[0].modules())
    return {
        one
        for one in model.modules()
        if isinstance(one, Projection) and one.is_whole and (one.mesh.size == 1 or one in first)
    }


def _norm(model: CausalLM, inputs: int, dtype: torch.dtype) -> RowNorm | None:
    """Return the norm before a layer with this number of inputs."""
    norm = model.spec.norm
    if norm.kind != "rms":
        return None
    of_stream = inputs == model.spec.hidden_size
    return RowNorm(
        model.residual_dtype if of_stream else dtype, torch.float32 if norm.offset and of_stream else dtype, norm.eps
    )


def launch_packed(model: LayeredModel) -> None:
    """Launch the kernels of layers whose weights will be quantized when they are loaded, with matrices of zeros: for
    compiling them ahead."""
    last, shapes = _outputs(model), set()
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.scheme, PackedOnGpu):
            added = layer in last and layer.is_whole
            shape = (*_own(layer), layer.gates, added, layer.has_bias)
            if shape not in shapes:
                shapes.add(shape)
                layer.scheme.launch(*shape, model.residual_dtype)


def _groups(model: Model) -> list[products.Like]:
    """Return groups of like matrices; [] if some products are not run by the library."""
    if not isinstance(model, CausalLM) or products.products() is None:
        return []
    groups: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    last, wide = _outputs(model), _wide(model)
    added: set[torch.Size] = set()
    gated: set[torch.Size] = set()
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
            if _gates(module):
                gated.add(weight.shape)
    return [products.Like(like, dtype, shape in added, shape in gated) for (shape, dtype), like in groups.items()]


def _ordered_groups(model: Model) -> list[products.Like]:
    """Return groups of like matrices whose products have one order of sums."""
    if not isinstance(model, CausalLM):
        return []
    groups: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    wide = _wide(model)
    for module in model.modules():
        if isinstance(module, Projection) and isinstance(module.scheme, Ordered) and module.scheme.weight is not None:
            weight = module.scheme.weight
            groups.setdefault((weight.shape, torch.float32 if module in wide else weight.dtype), []).append(weight)
    return [products.Like(like[:_LIKE], dtype) for (_, dtype), like in groups.items()]


def _outputs(model: LayeredModel) -> set[Any]:
    """Return the operations whose outputs belong to the residual stream."""
    return {out for block in model.modules() if isinstance(block, DecoderLayer) for out in block.outputs}


def _added(model: LayeredModel) -> set[Any]:
    """Return the operations that can add to the stream themselves; shared experts only for one token."""
    blocks = [block for block in model.modules() if isinstance(block, DecoderLayer) and block.multiplier == 1.0]
    parts = [part for block in blocks for part in ((block.mixer, block.mixed_norm), (block.mlp, block.mlp_norm))]
    shared = {part.shared.out for part, _ in parts if isinstance(part, Experts) and part.shared is not None}
    return shared | {part.out for part, norm in parts if part is not None and norm is None}


def _wide(model: LayeredModel) -> set[Any]:
    """Return the layers with float32 outputs."""
    return {getattr(model, "head", None), *(one.router for one in model.modules() if isinstance(one, Experts))}


def _gates(layer: Projection) -> bool:
    return layer.gates and layer.activation == "silu"


def _shape(layer: Projection, spec: DecoderSpec) -> tuple[int, int]:
    """Return a layer's outputs and inputs on this rank."""
    if isinstance(layer, Linear):
        return _own(layer)
    own = layer.source.own if isinstance(layer, TiedHead) else None
    return spec.vocab_size if own is None else len(own), spec.hidden_size


def _own(layer: Linear) -> tuple[int, int]:
    inputs = layer.cuts[0].inputs
    return sum(layer.sizes), layer.parts[0].in_features if inputs is None else len(inputs)
