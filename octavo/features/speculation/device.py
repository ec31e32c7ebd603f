"""Prompt lookup on a device, for all rows at once and without waiting for it: `lookup.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def matched(
    text: Tensor, size: Tensor, known: Tensor, length: Tensor, place: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Return for each of D rows the longest occurrence of the end of `known` in `text`; of equally long ones the one
    that ends nearest to `place`.

    Args:
        text: [D, L] integers; only the first `size` [D] of a row count, and the last of these can't end an occurrence.
        known: [D, N] integers; the first `length` [D] of each row count.
        place: [D] integers.
        most: most tokens to compare.

    Returns:
        The index of the occurrence's last token, and how many tokens match (0 for none), [D] int64 each.
    """
    columns = torch.arange(text.shape[1], device=text.device)
    agrees = columns < size[:, None] - 1
    run = torch.zeros_like(text, dtype=torch.int64)
    for back in range(min(most, text.shape[1])):
        index = length - 1 - back
        token = known.gather(1, index.clamp(min=0)[:, None])
        shifted = text[:, : text.shape[1] - back] == token
        agrees = torch.cat([agrees[:, :back].zero_(), agrees[:, back:] & shifted], 1) & (index >= 0)[:, None]
        run += agrees
    farthest = text.shape[1] + known.shape[1]
    score = run * (farthest + 1) - (columns - place[:, None]).abs().clamp(max=farthest)
    best = score.argmax(1)
    return best, run.gather(1, best[:, None])[:, 0]


def following(text: Tensor, size: Tensor, end: Tensor, count: int, *, repeat: bool) -> tuple[Tensor, Tensor]:
    """Return `count` tokens after index `end` [D] of each row, [D, count], and how many of them are valid, [D].

    Args:
        repeat: continue beyond the end of the text with the same tokens again.
    """
    order = torch.arange(count, device=text.device)
    period = (size - 1 - end).clamp(min=1)
    ahead = order % period[:, None] if repeat else order.expand(len(end), count)
    places = (end[:, None] + 1 + ahead).clamp(max=text.shape[1] - 1)
    valid = torch.full_like(end, count) if repeat else (size - 1 - end).clamp(min=0, max=count)
    return text.gather(1, places), valid
