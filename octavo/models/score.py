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


class TokenScore(ScoreHead):
    """A score from the language model's head: the logit of one token, or how much larger that of the second of two is
    than that of the first, whose sigmoid is the second's probability among the two (Qwen3-Reranker,
    https://arxiv.org/abs/2506.05176)."""

    def __init__(self, device: torch.device, head: str, rows: int, size: int, tokens: Sequence[int]) -> None:
        """
        Args:
            head: name of the stored matrix [rows, size] of the head.
        """
        super().__init__(device, size, 1)
        stored = TensorSpec((rows, size), torch.float32)
        self._wanted = [Wanted(head, stored, index=(slice(token, token + 1), slice(0, size))) for token in tokens]

    def wanted(self) -> list[Wanted]:
        return self._wanted

    def place(self, tensors: Sequence[Stored | None]) -> None:
        first, *second = (plain(tensor) for tensor in tensors)
        self.weight = second[0] - first if second else first.clone()
