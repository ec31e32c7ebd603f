"""Log-probabilities of sampled tokens and of prompts on a device, without synchronization."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.device.transfer import Download, download

_SPARE = 40
_CHUNK = 128
"""Rows of a prompt whose logits are computed at a time, which bounds memory."""

Columns = list[Download]
"""The four columns of `TokenLogprobs`."""


def columns_of(logits: Tensor, tokens: Tensor, wanted: int | Tensor, *, as_logits: bool = False) -> Columns:
    """Start `token_logprobs` and its transfer to the host; more than 40 tokens tied with the last one may be cut.

    Args:
        logits: [n, V].
        tokens: [n] integers, the chosen ones.
        wanted: a number of most likely tokens, or ids [n, k] int64.
        as_logits: report logits instead of log-probabilities.
    """
    raw = logits.float()
    picked = tokens.long()[:, None]
    logprobs = raw if as_logits else raw.log_softmax(-1)
    ranks = (raw > raw.gather(-1, picked)).sum(-1) + 1
    ids = _most_likely(raw, wanted) if isinstance(wanted, int) else wanted
    return [download(part) for part in (logprobs.gather(-1, picked).squeeze(-1), ranks, ids, logprobs.gather(-1, ids))]


def entries_of(columns: Columns) -> list[TokenLogprobs]:
    """Wait for the transfers and return the entries."""
    return [TokenLogprobs(*entry) for entry in zip(*(part.wait().tolist() for part in columns), strict=True)]


def prompt_columns(hidden: Tensor, tokens: Tensor, count: int, logits_of: Callable[[Tensor], Tensor]) -> list[Columns]:
    """Start `prompt_logprobs` in chunks, with transfers to the host; the arguments are the same."""
    made = []
    for part, following in zip(hidden.split(_CHUNK), tokens.split(_CHUNK), strict=True):
        logits = logits_of(part)
        made.append(columns_of(logits, following, logits.shape[-1] if count < 0 else count))
    return made


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Return [n, count] ids, best first, ties by the lower id."""
    values, ids = logits.topk(min(count + _SPARE, logits.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    _, again = torch.sort(values.gather(-1, order), dim=-1, descending=True, stable=True)
    return ids.gather(-1, again)[:, :count]
