"""Unquantised weights: a plain matrix in the model's dtype, or on a CPU its oneDNN-packed form."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.quant.base import Part
from octavo.nn.weights import TensorSpec, owned, tensor_bytes


class Unquantised:
    """One weight [out, in] and an optional bias [out].

    A CPU multiplies 1.05 to 3.5 times faster (most with few rows) with weights packed once for oneDNN than with
    `F.linear`, which packs them at every call; the plain matrix is dropped, so there is one copy.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._packs = device.type == "cpu" and packing_works(dtype)
        self._packed: Tensor | None = None
        self._shared = False

    def stored(self, part: Part) -> dict[str, TensorSpec]:
        specs = {"weight": TensorSpec((part.out_features, part.in_features), self.dtype, out_dim=0, in_dim=1)}
        if part.bias:
            specs["bias"] = TensorSpec((part.out_features,), self.dtype, out_dim=0)
        return specs

    def prepare(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        weight = parts[0]["weight"] if len(parts) == 1 else torch.cat([p["weight"] for p in parts])
        if not self._packs and len(parts) == 1:
            weight = owned(weight)
        self._keep(weight)
        if "bias" in parts[0]:
            self.bias = torch.cat([p["bias"] for p in parts])

    def share(self, weight: Tensor) -> None:
        """Use another layer's matrix: no second copy, unless this machine multiplies faster with a packed one."""
        self._keep(weight)
        self._shared = self.weight is weight

    def apply(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")
        assert self.weight is not None, "weights are not loaded"
        return F.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self._packed, None if self._shared else self.weight, self.bias)

    def _keep(self, weight: Tensor) -> None:
        if self._packs:
            self._packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())
        else:
            self.weight = weight


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this torch build on this CPU multiplies with prepacked weights in `dtype`.

    The operators are private to torch, so they are tried once rather than trusted.
    """
    try:
        weight = torch.eye(16, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight)
        out = torch.ops.mkldnn._linear_pointwise.default(weight, packed, weight[0], "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(out, weight + weight[0])
