"""Log-probabilities under the raw logits, for the rows that ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.sampling.draw import ranked

_SPARE = 40


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> list[TokenLogprobs]:
    """For each row the chosen token's log-probability and rank, and the `count` most likely tokens.

    A rank is 1 + the number of tokens that are strictly more likely.

    Args:
        logits: [n, V], before any processing.
        tokens: [n] int64, the chosen ones.
    """
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    chosen = logits.gather(-1, tokens[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    ids = _most_likely(logits, count)
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
