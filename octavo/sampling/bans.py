"""Tokens that a request forbids: all but `allowed_token_ids`, and the last token of each of its bad words."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sampling.state import SampleRow


def forbid(logits: Tensor, rows: list[SampleRow]) -> None:
    """In place, for the rows that ask for it.

    Args:
        logits: [S, V] float32.
        rows: S of them.
    """
    for i, row in enumerate(rows):
        params = row.slot_params
        if params.allowed_ids is not None:
            index = params.allowed_ids.to(logits.device)
            kept = logits[i, index]
            logits[i].fill_(float("-inf"))
            logits[i, index] = kept
        if params.bad_words:
            banned = [word[-1] for word in params.bad_words if _ends_with(row, word[:-1])]
            if banned:
                logits[i, torch.tensor(banned, device=logits.device)] = float("-inf")


def _ends_with(row: SampleRow, beginning: list[int]) -> bool:
    """Whether the output ends with the beginning of a bad word."""
    count = len(beginning)
    return not count or (row.num_output >= count and row.tokens[-count:].tolist() == beginning)
