"""Bit masks of the allowed tokens of a batch's rows: the only form in which features forbid tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0, np.inf, -np.inf
).astype(np.float32)
"""[256, 8]: for each byte of a mask, the upper bound of its eight tokens' logits: +inf or -inf."""

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Masks of some rows of a batch; in the other rows all tokens are allowed.

    Attributes:
        rows: indices of rows of logits, without duplicates.
        words: [len(rows), `num_words`] int32. Bit t % 32 of word t // 32 is set if token t is allowed.
        errors: row -> reason why it can't be sampled at all.
    """

    rows: Sequence[int]
    words: Words
    errors: Mapping[int, str] = field(default_factory=dict)

    def addresses(self, count: int) -> NDArray[np.int64]:
        """Return [count] addresses of the rows' words; 0 for a row without a mask."""
        found = np.zeros(count, dtype=np.int64)
        found[list(self.rows)] = self.words.ctypes.data + np.arange(len(self.rows)) * self.words.strides[0]
        return found

    def within(self, vocab_size: int, columns: int) -> Allowed:
        """Return the masks for logits with more columns than the vocabulary: tokens beyond it are forbidden."""
        known = words_of(range(vocab_size), columns)
        words = np.pad(self.words, ((0, 0), (0, max(0, len(known) - self.words.shape[1]))))
        return replace(self, words=words[:, : len(known)] & known)

    def of(self, rows: Collection[int]) -> Allowed:
        """Return the part for these rows."""
        places = [place for place, row in enumerate(self.rows) if row in rows]
        return Allowed([self.rows[place] for place in places], self.words[places], self.errors)


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def words_of(tokens: Sequence[int], vocab_size: int) -> Words:
    """Return [`num_words`] int32 that allow only these tokens."""
    bits = np.zeros(32 * num_words(vocab_size), dtype=np.uint8)
    bits[np.asarray(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def in_common(parts: Sequence[Allowed]) -> Allowed | None:
    """Return the intersection; None if there are no parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    words: dict[int, Words] = {}
    errors: dict[int, str] = {}
    for part in parts:
        for row, mine in zip(part.rows, part.words, strict=True):
            words[row] = words[row] & mine if row in words else mine
        errors.update(part.errors)
    return Allowed(list(words), np.stack(list(words.values())), errors)


def forbid(logits: Tensor, allowed: Allowed) -> None:
    """Set forbidden tokens' logits [S, V], in host memory, to minus infinity, in place.

    In float32 this is a table look-up for each byte of the masks and a minimum, both without branches.
    """
    rows, words = allowed.words.shape
    bounds = np.empty((rows, words * 4, 8), dtype=np.float32)
    np.take(_LIMITS, np.ascontiguousarray(allowed.words).view(np.uint8), axis=0, out=bounds, mode="clip")
    limits = bounds.reshape(rows, words * 32)[:, : logits.shape[1]]
    if logits.dtype != torch.float32:
        index = torch.tensor(allowed.rows)
        logits[index] = logits[index].masked_fill_(torch.from_numpy(limits < 0), float("-inf"))
        return
    values = logits.numpy()
    for row, limit in zip(allowed.rows, limits, strict=True):
        np.fmin(values[row], limit, out=values[row])
