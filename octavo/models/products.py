"""Which matrix products a model runs on a GPU, so that each can be tried out before it is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from octavo.models.decoder import CausalLM
from octavo.models.model import Model
from octavo.nn.embedding import TiedHead
from octavo.nn.linear import Linear
from octavo.nn.ops import products
from octavo.nn.quant.gpu import OnGpu

_LIKE = 4


def choose_products(model: Model, rows: Iterable[int]) -> Collection[int]:
    """Choose algorithms for all linear layers and these numbers of rows; with fewer there is nothing to choose.

    Returns:
        the numbers of rows whose products are chosen and loaded.
    """
    if not isinstance(model, CausalLM) or products.products() is None:
        return ()
    groups: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    last = {layer for block in model.layers for layer in (block.attention.out, block.mlp.down)}
    added: set[torch.Size] = set()
    gates = {block.mlp.gate_up for block in model.layers}
    gated: set[torch.Size] = set()
    for module in model.modules():
        if isinstance(module, Linear | TiedHead) and isinstance(module.scheme, OnGpu):
            weight = module.scheme.weight
            if weight is None or weight.dtype.itemsize != 2 or module.scheme.bias is not None:
                return ()
            like = groups.setdefault((weight.shape, torch.float32 if module is model.head else weight.dtype), [])
            if len(like) < _LIKE:
                like.append(weight)
            if module in last and model.accumulates:
                added.add(weight.shape)
            if module in gates:
                gated.add(weight.shape)
    wanted = sorted({count for count in rows if count > OnGpu.fused_rows})
    made = [products.Like(like, dtype, shape in added, shape in gated) for (shape, dtype), like in groups.items()]
    products.choose(made, wanted)
    return wanted
