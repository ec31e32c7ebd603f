"""Tokens that a request forbids: all but `allowed_token_ids`, and the last token of its bad words."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from octavo.sampling import allowed
from octavo.sampling.allowed import Allowed
from octavo.sampling.state import SampleRow


def forbid(logits: Tensor, rows: list[SampleRow]) -> None:
    """Forbid the tokens in place, in the rows that request it.

    Args:
        logits: [S, V] float32.
        rows: S of them.
    """
    named = [(i, row.slot_params.allowed) for i, row in enumerate(rows) if row.slot_params.allowed is not None]
    if named:
        allowed.forbid(logits, Allowed([i for i, _ in named], np.stack([words for _, words in named])))
    for i, row in enumerate(rows):
        banned = [word[-1] for word in row.slot_params.bad_words if _ends_with(row, word[:-1])]
        if banned:
            logits[i, banned] = float("-inf")


def _ends_with(row: SampleRow, beginning: list[int]) -> bool:
    """Return whether the output ends with the beginning of a bad word."""
    count = len(beginning)
    return not count or (row.num_output >= count and row.tokens[-count:].tolist() == beginning)
