"""A number that multiplies the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.native.builder import RESIDUAL, ProgramBuilder
from octavo.nn.stream import Stream
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class StreamScale(WeightLayer):
    """Multiplies the residual stream by a learned number.

    Attributes:
        value: it, float32 without dimensions.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        """`path`: the name of the stored tensor, which has one element."""
        super().__init__(path, device)
        self.value: Tensor = torch.empty(())

    def forward(self, stream: Stream) -> None:
        stream.multiply(self.value)

    def emit(self, b: ProgramBuilder, size: int) -> None:
        """Add it to a native program, whose stream has `size` channels."""
        b.copy(RESIDUAL, RESIDUAL, size, scale=self.value.item())

    def wanted(self) -> list[Wanted]:
        return [Wanted(self.path, TensorSpec((1,), torch.float32))]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (value,) = tensors
        self.value = owned(plain(value)).reshape(())

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.value)
