"""Norms as layers; the arithmetic of RMSNorm is in `nn/ops/norm.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native.bindings import Dtype
from octavo.native.program import ProgramBuilder
from octavo.nn.ops.norm import add_rms_norm, rms_norm, sum_rms_norm
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class RMSNorm(WeightLayer):
    """Root-mean-square normalization over the last dimension (Zhang & Sennrich 2019)."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype, size: int, eps: float) -> None:
        super().__init__(path, device)
        self.dtype, self.size, self.eps = dtype, size, eps
        self.weight = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same, as a new tensor."""
        return rms_norm(x, self.weight, self.eps)

    def pack(self) -> None:
        """Convert the weights to float32, for the CPU kernels."""
        self.weight = self.weight.float().contiguous()

    def emit(self, b: ProgramBuilder, source: int, output: int, dtype: Dtype, zero_point: int = 0) -> None:
        """Add the norm of float32 rows to a native program; see `ProgramBuilder.norm`. The layer must be packed."""
        b.norm(source, output, dtype, self.size, self.weight.data_ptr(), self.eps, zero_point=zero_point)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). May overwrite x with the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def after(self, parts: Tensor | None, stream: Tensor) -> Tensor:
        """Add `parts` [P, T, size], if any, to the stream [T, size] in place, and return norm(stream)."""
        return self(stream) if parts is None else sum_rms_norm(parts, stream, self.weight, self.eps)

    def wanted(self) -> list[Wanted]:
        return [Wanted(f"{self.path}.weight", TensorSpec((self.size,), self.dtype))]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (weight,) = tensors
        self.weight = owned(plain(weight))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight)


class LayerNorm(WeightLayer):
    """Normalization to mean 0 and variance 1 over the last dimension (Ba et al. 2016); with scale and optional bias."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(
        self, path: str, device: torch.device, dtype: torch.dtype, size: int, eps: float, *, bias: bool = True
    ) -> None:
        super().__init__(path, device)
        self.dtype, self.size, self.eps, self.has_bias = dtype, size, eps, bias
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same, as a new tensor."""
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def wanted(self) -> list[Wanted]:
        names = ["weight", "bias"] if self.has_bias else ["weight"]
        return [Wanted(f"{self.path}.{name}", TensorSpec((self.size,), self.dtype)) for name in names]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        placed = [owned(plain(tensor)) for tensor in tensors if tensor is not None]
        self.weight, self.bias = placed[0], placed[1] if self.has_bias else None

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight, self.bias)
