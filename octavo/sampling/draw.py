"""Truncation and the draw: min_p, top_k and top_p, then inversion of the cumulative distribution.

Tokens are ranked by logit, ties by the lower id. Most draws avoid a full sort of the vocabulary by considering only the
most likely tokens first: if the sets that the filters keep certainly lie among them, the result is the full sort's.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COUNTS = (64, 2048)
"""Most likely tokens to consider before a full sort."""


def draw(logits: Tensor, peaks: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Sample from softmax(logits / temperature), tokens in the order of their ids.

    Args:
        logits: [n, V] float32.
        peaks: [n, 1] float32, the largest of each row.
        temperatures: [n, 1].
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64.
    """
    cumulated = _probabilities(logits, peaks, temperatures).cumsum(-1, dtype=torch.float64)
    return _pick(cumulated, uniforms)


def draw_filtered(logits: Tensor, peaks: Tensor, filters: Tensor, uniforms: Tensor) -> Tensor:
    """Sample from the tokens that min_p, top_k and top_p keep, in the order of their rank.

    Each filter applies to the renormalized probabilities that the one before it kept: top_p keeps the tokens whose
    predecessors sum to less than p.

    Args:
        logits: [n, V] float32.
        peaks: [n, 1] float32, the largest of each row.
        filters: [n, 4] float64: temperature, top_k (0 for all), top_p, min_p.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64.
    """
    tokens = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    totals = _totals(logits, peaks, filters)
    left = torch.arange(logits.shape[0], device=logits.device)
    for count in (*_COUNTS, logits.shape[1]):
        values, ids, sure = ranked(logits[left], count)
        picked, settled = _draw_ranked(values, sure, peaks[left], totals[left], filters[left], uniforms[left])
        tokens[left] = ids.gather(-1, picked[:, None]).squeeze(-1)
        left = left[~settled]
        if not len(left):
            break
    return tokens


def kept(logits: Tensor, filters: Tensor) -> Tensor:
    """Return the tokens that the filters of `draw_filtered` keep: bool [n, V].

    Args:
        logits, filters: as for `draw_filtered`.
    """
    values, ids, sure = ranked(logits, logits.shape[-1])
    _, among, _ = _weigh(values, sure, values[:, :1], torch.ones_like(filters[:, :1]), filters)
    return torch.empty_like(among).scatter_(-1, ids, among)


def ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` most likely tokens of each row, best first, ties by the lower id.

    Returns:
        values [n, count] and ids [n, count] int64; and sure [n], the number of leading ones that are certain: beyond
        them a token with an equal logit may be missing.
    """
    size = logits.shape[-1]
    if count >= size:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids, torch.full((logits.shape[0],), size, device=logits.device)
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, again = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, again), (values > values[:, -1:]).sum(-1)


def _draw_ranked(
    values: Tensor, sure: Tensor, peaks: Tensor, totals: Tensor, filters: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rank drawn for each row, and whether the considered tokens suffice to determine it."""
    weights, among, settled = _weigh(values, sure, peaks, totals, filters)
    return _pick((weights * among).cumsum(-1), uniforms), settled


def _weigh(
    values: Tensor, sure: Tensor, peaks: Tensor, totals: Tensor, filters: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [n, count] of the considered tokens, which of them are kept, and whether they suffice [n]."""
    temperature, top_k, top_p, min_p = filters[:, :, None].unbind(1)
    sure = sure[:, None]
    rank = torch.arange(values.shape[-1], device=values.device)
    weights = ((values - peaks.double()) / temperature).exp()
    likely = weights >= min_p
    among = likely & ((top_k == 0) | (rank < top_k)) & (rank < sure)
    cumulated = (weights * among).cumsum(-1)
    # Certain tokens suffice for min_p and top_k if either of them removes the first uncertain one.
    closed = (sure >= values.shape[-1]) | ((top_k > 0) & (top_k <= sure)) | ~likely[:, -1:]
    open_ended = (top_k == 0) & (min_p == 0)
    goal = top_p * torch.where(closed, cumulated[:, -1:], totals)
    settled = (closed & (top_p >= 1)) | ((closed | open_ended) & (goal <= cumulated[:, -1:]))
    among &= (cumulated - weights < goal) | (top_p >= 1) | (rank == 0)
    return weights, among, settled.squeeze(-1)


def _totals(logits: Tensor, peaks: Tensor, filters: Tensor) -> Tensor:
    """Return [n, 1] float64: the sum of all weights exp((logit - peak) / temperature), for rows with only top_p."""
    totals = torch.ones(logits.shape[0], 1, dtype=torch.float64, device=logits.device)
    rows = torch.nonzero((filters[:, 1] == 0) & (filters[:, 3] == 0)).squeeze(-1)
    if len(rows):
        totals[rows] = 1 / _probabilities(logits[rows], peaks[rows], filters[rows, :1]).amax(-1, keepdim=True).double()
    return totals


def _probabilities(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    return (logits - peaks).div_(temperatures.float()).softmax(-1)


def _pick(cumulated: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds the given fraction of the total; never one of weight 0."""
    goal = uniforms[:, None] * cumulated[:, -1:]
    goal = torch.minimum(goal, torch.nextafter(cumulated[:, -1:], torch.zeros_like(goal)))
    # Past the end only if no token is certain; the row is then drawn again from more of them.
    return torch.searchsorted(cumulated, goal, right=True).squeeze(-1).clamp_(max=cumulated.shape[-1] - 1)
