"""Unquantized weights: a plain matrix in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.quant.base import Part
from octavo.nn.quant.experts import ExpertsScheme, SeparateExperts
from octavo.nn.weights import Keep, Stored, TensorSpec, fused, plain, tensor_bytes


class Unquantized:
    """One weight [out, in] and an optional bias [out].

    Attributes:
        takes_blocks: whether quantized weights may be delivered as `QuantizedBlocks`.
        takes_codes: whether these may have a codebook.
    """

    takes_blocks = False
    takes_codes = False

    def __init__(self, dtype: torch.dtype, device: torch.device, keep: Keep = fused) -> None:
        self.dtype = dtype
        self.device = device
        self._keep = keep
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._shared = False

    def stored(self, part: Part) -> dict[str, TensorSpec]:
        return part.plain_specs(self.dtype)

    def prepare(self, parts: Sequence[Mapping[str, Stored]]) -> None:
        self.weight = self._keep([plain(part["weight"]) for part in parts])
        if "bias" in parts[0]:
            self.bias = torch.cat([plain(part["bias"]) for part in parts])

    def share(self, weight: Stored) -> None:
        """Use another layer's matrix, without a second copy."""
        self.weight = plain(weight)
        self._shared = True

    def apply(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "weights are not loaded"
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """Like `apply`, unrounded (float32) if that costs little."""
        return self.apply(x)

    def experts(self, form: ExpertsForm) -> ExpertsScheme:
        return SeparateExperts(form, partial(type(self), self.dtype, self.device, self._keep))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(None if self._shared else self.weight, self.bias)
