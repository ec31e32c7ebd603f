"""Unquantized weights on a GPU, multiplied by a kernel chosen by the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.delta import Addition, Delta
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import gated_tiles, one_row, products
from octavo.nn.ops.activation import silu_mul
from octavo.nn.quant.experts import ExpertsScheme
from octavo.nn.quant.gpu_experts import StackedExperts
from octavo.nn.quant.none import Unquantized


class OnGpu(Unquantized):
    """Fuses adjacent operations with products of a single row; uses the fastest measured call for others.

    Attributes:
        fused_rows: most rows supported by `fused`.
    """

    fused_rows = 1
    is_packed = False
    """Whether the weights are in another form than a plain matrix."""

    @property
    def multiplied(self) -> Tensor | None:
        """The plain matrix that the library multiplies with, if it is used."""
        return self.weight

    def apply(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "weights are not loaded"
        return self.fused(x) if self._fuses(x) else products.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "weights are not loaded"
        return products.linear(x, self.weight, self.bias, dtype=torch.float32)

    def experts(self, form: ExpertsForm) -> ExpertsScheme:
        return StackedExperts(form, self.dtype, self.device)

    def fused(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
        dtype: torch.dtype | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        assert self.weight is not None, "weights are not loaded"
        product = one_row.fused_product if delta is None else delta.fused
        return product(x, self.weight, bias=self.bias, norm=norm, gated=gated, add_to=add_to, dtype=dtype)

    def _fuses(self, x: Tensor) -> bool:
        """Return whether `fused` is the fastest product of x, also without anything to fuse, as on ranks."""
        return x.dim() == 2 and 0 < x.shape[0] <= self.fused_rows

    def gated(self, x: Tensor, addition: Addition | None = None) -> Tensor:
        assert self.weight is not None, "weights are not loaded"
        if addition is not None:
            tiles = self.bias is None and products.takes_tiles(x, self.weight)
            added = addition.alone() if tiles else None
            return addition.gated(self.apply(x)) if added is None else gated_tiles.product(x, self.weight, added)
        if self.bias is not None:
            return silu_mul(self.apply(x))
        return self.fused(x, gated=True) if self._fuses(x) else products.gated(x, self.weight)

    def leave(self, stream: Tensor, x: Tensor) -> Tensor | None:
        assert self.weight is not None, "weights are not loaded"
        parts = products.halves(x, self.weight)
        if parts is None:
            products.add_linear(stream, x, self.weight)
        return parts
