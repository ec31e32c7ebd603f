"""What the encoders of all families share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.whole import attend_whole
from octavo.nn.rope import Rope
from octavo.nn.step import StepInput


class LayeredEncoder(nn.Module):
    """The part of an `EncoderModel` that does not depend on the family.

    Attributes:
        attention_layers: empty, since nothing is cached.
        layers: modules that are called with the states and the step.
        head: computes labels from a pooled state; None if there is no classification head.
    """

    layers: nn.ModuleList
    head: nn.Module | None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.attention_layers: list[PagedAttention] = []

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """Run the layers: [T, hidden_size] to the same shape, before a final norm if there is one."""
        for layer in self.layers:
            x = layer(x, step)
        return x

    def final(self, hidden: Tensor) -> Tensor:
        """Return the states unchanged; their norm is part of the last layer."""
        return hidden

    def classify(self, pooled: Tensor) -> Tensor:
        """Return the head's outputs: [R, hidden_size] to [R, labels]."""
        assert self.head is not None, "the model has no classification head"
        logits: Tensor = self.head(pooled.to(self.dtype))
        return logits


def attend_rotated(heads: Tensor, rope: Rope, step: StepInput, reach: int | None = None) -> Tensor:
    """Rotate queries and keys in place, and attend within each sequence.

    Args:
        heads: [T, 3 * num_heads, head_dim]: queries, keys, values.
        reach: see `attend_whole`.

    Returns:
        [T, num_heads * head_dim].
    """
    num_heads = heads.shape[1] // 3
    rope.joint(heads[:, : 2 * num_heads], step.positions)
    q, k, v = heads.split(num_heads, dim=1)
    return attend_whole(q, k, v, step.attn.groups, reach).flatten(1)
