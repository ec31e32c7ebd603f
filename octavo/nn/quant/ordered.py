"""Unquantized weights on a GPU, multiplied in one order of sums for any number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import ordered
from octavo.nn.quant.experts import ExpertsScheme
from octavo.nn.quant.none import Unquantized


class Ordered(Unquantized):
    """See `nn/ops/ordered.py`. Nothing is fused with its products."""

    def apply(self, x: Tensor) -> Tensor:
        return self._multiplied(x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        return self._multiplied(x, torch.float32)

    def experts(self, form: ExpertsForm) -> ExpertsScheme:
        raise ConfigError(
            "--batch-invariant: this model is a mixture of experts, whose products on a GPU depend on how many tokens "
            "chose an expert. Leave it out, or serve the model on a CPU."
        )

    def _multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.weight is not None, "weights are not loaded"
        y = ordered.linear(x.reshape(-1, x.shape[-1]), self.weight, dtype).view(*x.shape[:-1], self.weight.shape[0])
        return y if self.bias is None else y + self.bias
