"""Log-probabilities, of sampled tokens and of prompts, on a device that runs behind the host: nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.device.transfer import Download

_SPARE = 40
_CHUNK = 128
"""Rows of a prompt whose logits are made at a time, which bounds memory."""

Columns = list[Download]
"""The four columns of `TokenLogprobs`, for some tokens."""


@dataclass(slots=True)
class PromptRow:
    """A row that computes part of a prompt whose log-probabilities were asked for.

    Attributes:
        row: its place in the plan.
        count: alternatives to report; -1 for the whole vocabulary.
        hidden: [n, hidden_size], states of its first n tokens.
        following: [n] int32, the prompt's token after each of them.
    """

    row: int
    count: int
    hidden: Tensor
    following: Tensor


def columns_of(logits: Tensor, tokens: Tensor, wanted: int | Tensor, *, as_logits: bool = False) -> Columns:
    """As `token_logprobs`, on the way; ties that reach over 40 tokens past the last wanted one may be cut.

    Args:
        logits: [n, V].
        tokens: [n] integers, the chosen ones.
        wanted: how many of the most likely ones, or their ids, [n, k] int64.
        as_logits: tell logits in place of log-probabilities.
    """
    raw = logits.float()
    picked = tokens.long()[:, None]
    logprobs = raw if as_logits else raw.log_softmax(-1)
    ranks = (raw > raw.gather(-1, picked)).sum(-1) + 1
    ids = _most_likely(raw, wanted) if isinstance(wanted, int) else wanted
    return [Download(part) for part in (logprobs.gather(-1, picked).squeeze(-1), ranks, ids, logprobs.gather(-1, ids))]


def entries_of(columns: Columns) -> list[TokenLogprobs]:
    """Wait for them."""
    return [TokenLogprobs(*entry) for entry in zip(*(part.wait().tolist() for part in columns), strict=True)]


def prompt_columns(prompt: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> list[Columns]:
    """A prompt's, in pieces. `logits_of` makes logits of hidden rows."""
    made = []
    for hidden, following in zip(prompt.hidden.split(_CHUNK), prompt.following.split(_CHUNK), strict=True):
        logits = logits_of(hidden)
        made.append(columns_of(logits, following, logits.shape[-1] if prompt.count < 0 else prompt.count))
    return made


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """[n, count] ids, best first, ties by the lower id."""
    values, ids = logits.topk(min(count + _SPARE, logits.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    _, again = torch.sort(values.gather(-1, order), dim=-1, descending=True, stable=True)
    return ids.gather(-1, again)[:, :count]
