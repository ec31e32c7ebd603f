"""`ScoreHead`: labels or rewards from a decoder's pooled state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, plain, tensor_bytes


class ScoreHead(WeightLayer):
    """A linear layer without a bias, `score` in checkpoints. It is small: every rank computes it, in float32, and it
    is no part of native programs."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, device: torch.device, size: int, labels: int) -> None:
        super().__init__("score", device)
        self._shape = (labels, size)
        self.weight = torch.empty(0)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return the labels' logits: [R, size] to [R, labels], float32."""
        return F.linear(pooled.float(), self.weight)

    def wanted(self) -> list[Wanted]:
        return [Wanted("score.weight", TensorSpec(self._shape, torch.float32))]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        self.weight = plain(tensors[0]).clone()

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight)
