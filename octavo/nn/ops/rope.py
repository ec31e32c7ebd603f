"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in its half-rotation ("neox") form."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k **in place** by their positions and return them.

    Channel i is paired with channel i + rotary_dim / 2; channels from rotary_dim on are unchanged. The arithmetic is
    always float32, rounded once.

    Args:
        q: [T, H, D]; may be a strided view, for instance into a fused projection's output.
        k: [T, KVH, D]; likewise.
        cos_sin: [max_pos, rotary_dim] float32, the cosines in the first half of each row and the sines in the second.
        positions: [T] integers.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    _rotate_(q, cos, sin)
    _rotate_(k, cos, sin)
    return q, k


def apply_rope_joint(qk: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Like `apply_rope`, for concatenated queries and keys [T, H + KVH, D], in half as many operations."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    _rotate_(qk, cos, sin)
    return qk


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    new_first = torch.mul(first, cos).sub_(second * sin)
    new_second = torch.mul(second, cos).add_(first * sin)
    first.copy_(new_first)
    second.copy_(new_second)
