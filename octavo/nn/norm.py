"""Norms as layers; the arithmetic of RMSNorm is in `nn/ops/norm.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native.bindings import Dtype
from octavo.native.builder import NormArgs, ProgramBuilder
from octavo.nn.ops.norm import add_rms_norm, rms_norm, sum_rms_norm
from octavo.nn.stream import Summands
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class Norm(WeightLayer):
    """A norm over the last dimension, in the forms that a residual stream needs.

    Attributes:
        dtype: of its results.
    """

    dtype: torch.dtype
    size: int
    eps: float

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    @property
    def scale(self) -> tuple[Tensor, float] | None:
        """The weights and epsilon of an RMSNorm, which products can fuse; None for another norm."""
        return None

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). May overwrite x with the sum."""
        total = x.add_(residual) if x.dtype == residual.dtype else residual + x
        return self(total), total

    def after(self, parts: Tensor | None, stream: Tensor) -> Tensor:
        """Add `parts` [P, T, size], if any, to the stream [T, size] in place, and return norm(stream)."""
        if parts is not None:
            stream.add_(parts.sum(0, dtype=torch.float32))
        return self(stream)

    def summed(self, summands: Summands, stream: Tensor) -> Tensor:
        """Add the sum to the stream [T, size] in place, and return norm(stream)."""
        stream.add_(summands.total())
        return self(stream)

    def pack(self) -> None:
        """Convert the weights for the CPU kernels."""

    @abstractmethod
    def kernel_args(self) -> NormArgs | None:
        """Return the norm for a native program, which the layer must outlive; None for one that changes nothing. The
        layer must be packed."""

    def emit(self, b: ProgramBuilder, source: int, output: int, dtype: Dtype, zero_point: int = 0) -> int:
        """Add the norm of float32 rows to a native program; see `ProgramBuilder.norm`.

        Returns:
            The buffer of the results: `output`, or `source` if that holds them already.
        """
        args = self.kernel_args()
        if args is not None:
            b.norm(source, output, dtype, args, zero_point=zero_point)
        elif dtype is Dtype.FLOAT:
            return source
        elif dtype is Dtype.BFLOAT:
            b.narrow(source, output, self.size)
        else:
            b.quantize(source, output, Dtype.FLOAT, self.size, zero_point=zero_point)
        return output

    def emit_in_place(self, b: ProgramBuilder, buffer: int, begin: int, values: int) -> None:
        """Add the norm of each `size` of the values [begin, begin + values) of float32 rows to a native program."""
        args = self.kernel_args()
        if args is not None:
            b.norm_groups(buffer, args, begin, values // self.size)


class RMSNorm(Norm):
    """Root-mean-square normalization over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(
        self,
        path: str,
        device: torch.device,
        dtype: torch.dtype,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        scaled: bool = True,
    ) -> None:
        """
        Args:
            offset: added to the stored weight, which is then kept in float32.
            scaled: a weight is stored; else all weights are one.
        """
        super().__init__(path, device)
        self.dtype, self.size, self.eps, self.offset, self.scaled = dtype, size, eps, offset, scaled
        self.weight = torch.empty(0)

    @property
    def scale(self) -> tuple[Tensor, float]:
        return self.weight, self.eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same, as a new tensor."""
        return rms_norm(x, self.weight, self.eps, self.dtype)

    def pack(self) -> None:
        """Convert the weights to float32, for the CPU kernels; results are float32, too."""
        self.weight = self.weight.float().contiguous()
        self.dtype = torch.float32

    def kernel_args(self) -> NormArgs:
        return NormArgs(self.size, self.eps, self.weight.data_ptr())

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, self.dtype)

    def after(self, parts: Tensor | None, stream: Tensor) -> Tensor:
        return self(stream) if parts is None else sum_rms_norm(parts, stream, self.weight, self.eps, self.dtype)

    def summed(self, summands: Summands, stream: Tensor) -> Tensor:
        return summands.normed_with(stream, self.scale, self.dtype)

    def wanted(self) -> list[Wanted]:
        dtype = torch.float32 if self.offset else self.dtype
        return [Wanted(f"{self.path}.weight", TensorSpec((self.size,), dtype))] if self.scaled else []

    def place(self, tensors: Sequence[Stored | None]) -> None:
        if not self.scaled:
            self.weight = torch.ones(self.size, dtype=self.dtype, device=self.device)
            return
        (weight,) = tensors
        self.weight = owned(plain(weight))
        if self.offset:
            self.weight += self.offset

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight)


class LayerNorm(Norm):
    """Normalization to mean 0 and variance 1 over the last dimension (Ba et al. 2016); with optional scale and bias."""

    def __init__(
        self,
        path: str,
        device: torch.device,
        dtype: torch.dtype,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        scaled: bool = True,
        offset: float = 0.0,
        heads: int = 0,
        own: slice | None = None,
    ) -> None:
        """
        Args:
            offset: added to the stored weight, which is then kept in float32.
            heads: stored weights of each head, [heads, size], for inputs [..., heads, size]; 0 for one weight [size].
            own: the heads of this rank; None for all.
        """
        super().__init__(path, device)
        self.dtype, self.size, self.eps = dtype, size, eps
        self.has_bias, self.scaled, self.offset, self.heads = bias, scaled, offset, heads
        self._index = None if own is None else (own, slice(None))
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same, as a new tensor of the layer's dtype."""
        weight, bias = (None if t is None else t.to(x.dtype) for t in (self.weight, self.bias))
        if self.heads and weight is not None:
            return F.layer_norm(x, (self.size,), eps=self.eps).mul_(weight).to(self.dtype)
        return F.layer_norm(x, (self.size,), weight, bias, self.eps).to(self.dtype)

    def pack(self) -> None:
        """Convert the weights to float32, for the CPU kernels; results are float32, too."""
        self.weight, self.bias = (None if t is None else t.float().contiguous() for t in (self.weight, self.bias))
        self.dtype = torch.float32

    def kernel_args(self) -> NormArgs:
        weight, bias = (0 if t is None else t.data_ptr() for t in (self.weight, self.bias))
        return NormArgs(self.size, self.eps, weight, bias, centered=True, own_weights=bool(self.heads))

    def wanted(self) -> list[Wanted]:
        names = (["weight"] if self.scaled else []) + (["bias"] if self.has_bias else [])
        dtype = torch.float32 if self.offset else self.dtype
        shape = (self.heads, self.size) if self.heads else (self.size,)
        return [Wanted(f"{self.path}.{name}", TensorSpec(shape, dtype), index=self._index) for name in names]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        placed = [owned(plain(tensor)) for tensor in tensors]
        if self.has_bias:
            self.bias = placed.pop()
        if self.scaled:
            self.weight = placed.pop() + self.offset if self.offset else placed.pop()

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight, self.bias)


class NoNorm(Norm):
    """Returns its input, in the model's dtype: in place of a norm that a layer does not have."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype, size: int) -> None:
        super().__init__(path, device)
        self.dtype, self.size = dtype, size

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return x.to(self.dtype)

    def pack(self) -> None:
        """Return float32 from now on."""
        self.dtype = torch.float32

    def kernel_args(self) -> None:
        return None

    def wanted(self) -> list[Wanted]:
        return []

    def place(self, tensors: Sequence[Stored | None]) -> None:
        """Take nothing."""

    @property
    def nbytes(self) -> int:
        return 0
