"""Bidirectional attention of whole sequences, full or within a window; nothing is cached.

The batch is ragged: sequences of equal length are computed together, without padding. `attend_whole` is the operation;
`WholeAttention` is the same as a backend, for models whose layers are those of decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.transfer import upload
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.step import StepInput


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


@dataclass(slots=True)
class WholeStep:
    """A step's groups, and the keys and values of the layer that attends."""

    groups: Sequence[LengthGroup]
    keys: Tensor | None = None
    values: Tensor | None = None


class WholeAttention:
    """An `AttentionBackend` without a cache, whose steps have whole sequences. A window reaches as far ahead as back: a
    query at position p attends to keys in (p - window, p + window)."""

    name = "whole"
    follows_table_rows = False

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (0,)

    def prepare(self, step: StepInput, block_size: int) -> WholeStep:
        """Group sequences of equal length, which are computed together."""
        assert step.query_lens is not None
        return WholeStep(groups_of(step.query_lens, step.device))

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        """Keep k and v until `attend` takes them."""
        step.attn.keys, step.attn.values = k, v

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        own: WholeStep = step.attn
        assert own.keys is not None
        assert own.values is not None
        reach = None if spec.window is None else spec.window - 1
        attended = attend_whole(q, own.keys, own.values, own.groups, reach, spec.scale)
        own.keys = own.values = None
        return attended


def attend_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[LengthGroup],
    reach: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ) v within each sequence.

    Args:
        q: [T, heads, head_dim].
        k, v: [T, kv_heads, head_dim]; each is of heads / kv_heads consecutive queries.
        reach: a token attends to those at most this many positions away; None for all.
        scale: None for head_dim ** -0.5.

    Returns:
        [T, heads, head_dim].
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    each = q.shape[1] // k.shape[1]
    for group in groups:
        mine, keys, values = (
            x[group.tokens].view(group.count, group.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
        )
        if each > 1:
            keys, values = keys.repeat_interleave(each, dim=1), values.repeat_interleave(each, dim=1)
        mask = _band(group.length, reach, q.device) if reach is not None and reach < group.length - 1 else None
        attended = F.scaled_dot_product_attention(mine, keys, values, attn_mask=mask, scale=scale)
        out[group.tokens] = attended.transpose(1, 2).reshape(-1, *q.shape[1:])
    return out


def _band(length: int, reach: int, device: torch.device) -> Tensor:
    """Return [length, length], true where two positions are at most `reach` apart."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= reach
