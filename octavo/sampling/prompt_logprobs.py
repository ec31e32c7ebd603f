"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.sampling.logprobs import token_logprobs

_CHUNK = 128
"""Rows of logits computed at a time, which bounds memory: a prompt has many rows, a vocabulary many columns."""


def prompt_logprobs(
    hidden: Tensor, tokens: Tensor, count: int, logits_of: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    """Return for each row the log-probability of the token that follows it in the prompt.

    Args:
        hidden: [n, hidden_size].
        tokens: [n] integers, the tokens that follow.
        count: alternatives to report; -1 for the whole vocabulary.
        logits_of: function from hidden rows to logits.
    """
    found: list[TokenLogprobs] = []
    for part, following in zip(torch.split(hidden, _CHUNK), torch.split(tokens, _CHUNK), strict=True):
        logits = logits_of(part)
        found += token_logprobs(logits, following.long(), logits.shape[-1] if count < 0 else count)
    return found
