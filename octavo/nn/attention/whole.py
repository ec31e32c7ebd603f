"""Bidirectional attention of whole sequences, full or within a window; nothing is cached.

The batch is ragged: sequences of equal length are computed together, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.transfer import upload


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Sequences of equal length. `tokens` [count * length] int64: their indices in the batch."""

    tokens: Tensor
    count: int
    length: int


def groups_of(lengths: Sequence[int], device: torch.device) -> list[LengthGroup]:
    """Return the groups of a batch of consecutive sequences."""
    counts = np.asarray(lengths, dtype=np.int64)
    starts = counts.cumsum() - counts
    groups = []
    for length in np.unique(counts):
        places = starts[counts == length][:, None] + np.arange(length)
        groups.append(LengthGroup(upload(places.ravel(), device), len(places), int(length)))
    return groups


def attend_whole(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[LengthGroup], reach: int | None = None) -> Tensor:
    """Return softmax(q kᵀ / sqrt(head_dim)) v within each sequence.

    Args:
        q, k, v: [T, heads, head_dim].
        reach: a token attends to those at most this many positions away; None for all.

    Returns:
        [T, heads, head_dim].
    """
    out = torch.empty_like(q)
    for group in groups:
        shape = (group.count, group.length, *q.shape[1:])
        mine, keys, values = (x[group.tokens].view(shape).transpose(1, 2) for x in (q, k, v))
        mask = _band(group.length, reach, q.device) if reach is not None and reach < group.length - 1 else None
        attended = F.scaled_dot_product_attention(mine, keys, values, attn_mask=mask)
        out[group.tokens] = attended.transpose(1, 2).reshape(-1, *q.shape[1:])
    return out


def _band(length: int, reach: int, device: torch.device) -> Tensor:
    """Return [length, length], true where two positions are at most `reach` apart."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= reach
