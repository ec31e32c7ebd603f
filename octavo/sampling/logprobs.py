"""Log-probabilities under the raw logits, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.sampling.draw import ranked

_SPARE = 40

Wanted = int | tuple[int, ...]
"""What is told beside each chosen token: so many of the most likely ones, or these."""


def together(asking: Mapping[int, Wanted | None]) -> list[tuple[list[int], int | NDArray[np.int64]]]:
    """The rows that ask for something, in groups to be computed at once: for a count, or for ids [rows, k]."""
    groups: dict[tuple[bool, int], list[int]] = {}
    for row, wanted in asking.items():
        if wanted is not None:
            key = (True, len(wanted)) if isinstance(wanted, tuple) else (False, wanted)
            groups.setdefault(key, []).append(row)
    return [
        (rows, np.array([asking[row] for row in rows]) if named else count) for (named, count), rows in groups.items()
    ]


def token_logprobs(logits: Tensor, tokens: Tensor, wanted: int | Tensor) -> list[TokenLogprobs]:
    """For each row the chosen token's log-probability and rank, and those of the tokens that are wanted beside it.

    A rank is 1 + the number of tokens that are strictly more likely.

    Args:
        logits: [n, V], before any processing.
        tokens: [n] int64, the chosen ones.
        wanted: how many of the most likely ones, or their ids, [n, k] int64.
    """
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    chosen = logits.gather(-1, tokens[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    ids = _most_likely(logits, wanted) if isinstance(wanted, int) else wanted
    return [
        TokenLogprobs(*row)
        for row in zip(
            logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist(),
            ranks.tolist(),
            ids.tolist(),
            logprobs.gather(-1, ids).tolist(),
            strict=True,
        )
    ]


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """[n, count] ids, best first. More than needed are looked at, since a tie at the end calls for a full sort."""
    _, ids, sure = ranked(logits, count + _SPARE)
    ids = ids[:, :count].contiguous()
    unsure = torch.nonzero(sure < min(count, logits.shape[-1])).squeeze(-1)
    if len(unsure):
        ids[unsure] = ranked(logits[unsure], logits.shape[-1])[1][:, :count]
    return ids
