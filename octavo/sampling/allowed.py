"""Which tokens are possible in the rows of a batch, a bit for each: the one form in which features forbid tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0, np.inf, -np.inf
).astype(np.float32)
"""[256, 8]: for each byte of a mask, what the logits of its eight tokens may be at most."""

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Some rows of a batch in which not every token is possible; in the others all are.

    Attributes:
        rows: which rows of logits, each once.
        words: [len(rows), `num_words`] int32. Bit t % 32 of word t // 32 is set if token t is possible.
        errors: row -> why it can't be sampled at all.
    """

    rows: Sequence[int]
    words: Words
    errors: Mapping[int, str] = field(default_factory=dict)

    def addresses(self, count: int) -> NDArray[np.int64]:
        """[count]: where in memory the words of each of so many rows are; 0 for a row in which all is possible."""
        found = np.zeros(count, dtype=np.int64)
        found[list(self.rows)] = self.words.ctypes.data + np.arange(len(self.rows)) * self.words.strides[0]
        return found

    def of(self, rows: Collection[int]) -> Allowed:
        """The part that is about these rows."""
        places = [place for place, row in enumerate(self.rows) if row in rows]
        return Allowed([self.rows[place] for place in places], self.words[places], self.errors)


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def words_of(tokens: Sequence[int], vocab_size: int) -> Words:
    """[`num_words`] int32: just these tokens are possible."""
    bits = np.zeros(32 * num_words(vocab_size), dtype=np.uint8)
    bits[np.asarray(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def in_common(parts: Sequence[Allowed]) -> Allowed | None:
    """What all of them allow; None if there are none."""
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
    """Minus infinity for the impossible tokens of logits [S, V], in the host's memory, in place.

    In float32 a table look-up for each byte of the masks and a minimum, both without a branch.
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
