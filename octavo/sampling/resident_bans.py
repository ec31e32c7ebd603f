"""`bans.py` on an asynchronous device: whether a bad word has begun is known only on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from octavo.device.transfer import upload
from octavo.sampling import resident_allowed
from octavo.sampling.resident_allowed import places_of

if TYPE_CHECKING:
    from octavo.sampling.resident import ResidentRow


def forbid(logits: Tensor, tokens: Tensor, rows: Sequence[ResidentRow]) -> None:
    """Forbid the tokens in place, in the rows that request it.

    Args:
        logits: [S, V] float32, contiguous.
        tokens: [slots, max_model_len] int32, contiguous, each slot's tokens.
        rows: S of them.
    """
    allow(logits, rows)
    _end_bad_words(logits, tokens, rows)


def allow(logits: Tensor, rows: Sequence[ResidentRow]) -> None:
    """Minus infinity for all but a row's `allowed_token_ids`, in place, for the rows that have some."""
    named = [(i, row.params.allowed) for i, row in enumerate(rows) if row.params.allowed is not None]
    if named:
        which = upload(places_of([i for i, _ in named], len(logits)), logits.device)
        resident_allowed.forbid(logits, which, upload(np.stack([words for _, words in named]), logits.device))


def _end_bad_words(logits: Tensor, tokens: Tensor, rows: Sequence[ResidentRow]) -> None:
    """Set to minus infinity the last token of each word whose beginning the output ends with."""
    flat, vocab = logits.view(-1), logits.shape[1]
    words = [
        (i, row, word)
        for i, row in enumerate(rows)
        for word in row.params.bad_words
        if row.num_tokens - row.num_prompt >= len(word) - 1
    ]
    if not words:
        return
    lasts = np.asarray([i * vocab + word[-1] for i, _, word in words])
    longest = max(len(word) for *_, word in words) - 1
    if longest == 0:
        flat.index_fill_(0, upload(lasts, logits.device), float("-inf"))
        return
    wanted = np.full((len(words), longest), -1, dtype=np.int64)
    places = np.zeros((len(words), longest), dtype=np.int64)
    for j, (_, row, word) in enumerate(words):
        count = len(word) - 1
        wanted[j, :count] = word[:-1]
        places[j, :count] = row.slot * tokens.stride(0) + row.num_tokens - count + np.arange(count)
    expected = upload(wanted, logits.device)
    seen = tokens.view(-1)[upload(places, logits.device)]
    ends = ((seen == expected) | (expected < 0)).all(1)
    begun = logits.new_zeros(len(words)).masked_fill_(ends, float("-inf"))
    # Added, not assigned: two words may share their last token, and one that has not begun must not undo the other.
    flat.index_add_(0, upload(lasts, logits.device), begun)
