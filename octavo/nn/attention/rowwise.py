"""Attention on a CPU row by row, with what fused kernels lack: linear biases (ALiBi, Press et al. 2022,
https://arxiv.org/abs/2108.12409), windows that begin at multiples of their size, drafts that branch, and tokens that
attend to later ones."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec, seen

_QUERIES = 128
"""Queries that are computed together, which bounds the memory for scores."""


def attend_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    unseen: Tensor | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Return attention of one sequence, causal except for `ahead`, in float32.

    Args:
        q: [n, num_heads, head_dim], the queries of the sequence's last n positions.
        k, v: [length, num_kv_heads, head_dim], the whole sequence.
        sinks: [num_heads], scores of a last key, whose value is 0.
        unseen, ahead: [n], as in `StepInput`.

    Returns:
        [n, num_heads, head_dim] float32.
    """
    count, length = q.shape[0], k.shape[0]
    # Cells that no query sees may hold anything, NaN included: their blocks may be another sequence's by now.
    first = 0 if spec.window is None else max(0, spec.first_visible(length - count))
    k, v = k[first:], v[first:]
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    places = torch.arange(first, length)
    # A query's own position shifts all its scores alike, so the softmax doesn't depend on it.
    slopes = torch.zeros(spec.num_heads) if spec.slopes is None else torch.tensor(spec.slopes)
    bias = slopes[:, None, None] * (places - length + 1)
    out = torch.empty(q.shape, dtype=torch.float32)
    for begin in range(0, count, _QUERIES):
        queries = q[begin : begin + _QUERIES].float().transpose(0, 1) * spec.scale
        positions = torch.arange(length - count + begin, length - count + begin + queries.shape[1])[:, None]
        last = positions if ahead is None else positions + ahead[begin : begin + _QUERIES, None]
        visible = places <= last
        if spec.window is not None:
            visible &= places >= spec.first_visible(positions)
        if unseen is not None:
            visible &= seen(unseen[begin : begin + _QUERIES, None], positions - places)
        scores = queries @ keys.transpose(1, 2)
        if spec.soft_cap is not None:
            scores = scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        scores = scores.add_(bias).masked_fill_(~visible, float("-inf"))
        if sinks is not None:
            # The bias is that of the last position; relative to it, the sink has the bias of the query's.
            own = sinks[:, None] + slopes[:, None] * (positions[:, 0] - length + 1)
            scores = torch.cat([scores, own[..., None]], dim=-1)
        weights = scores.softmax(-1)[..., : length - first]
        out[begin : begin + _QUERIES] = (weights @ values).transpose(0, 1)
    return out
