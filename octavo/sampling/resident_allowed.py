"""`allowed.py` on a device: masks at fixed addresses, as recorded sampling requires."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv
from octavo.device.transfer import link_of, upload
from octavo.sampling.allowed import Allowed, num_words
from octavo.sampling.triton_draw import forbid_kernel

_BLOCK = 4096


class ResidentAllowed:
    """Allowed tokens of the rows of the current batch.

    Attributes:
        which: [rows] int32, index of a row's mask in `words`; -1 if all tokens are allowed.
        words: [rows, `num_words`] int32, as `Allowed.words`.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.which = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.words = torch.zeros(max_rows, num_words(vocab_size), dtype=torch.int32, device=device)
        self._rows: list[int] = []
        self._lane = link_of(device).stream()

    @contextmanager
    def during(self, allowed: Allowed | None) -> Iterator[None]:
        """Context in which launched work reads these masks; None allows everything.

        They are sent while the device computes earlier work. If that may still read `which`, its transfer waits; its
        values rarely change.
        """
        rows = [] if allowed is None else list(allowed.rows)
        if allowed is not None and rows:
            lacking = self.words.shape[1] - allowed.words.shape[1]  # those of added tokens
            words = np.pad(allowed.words, ((0, 0), (0, lacking))) if lacking else allowed.words
            self._lane.send(words, self.words[: len(rows)])
        if rows != self._rows:
            self.which.copy_(upload(places_of(rows, len(self.which)), self.which.device))
            self._rows = rows
        yield
        if rows:
            self._lane.done()

    def forbid(self, logits: Tensor) -> None:
        """Minus infinity for the impossible tokens of logits [S, V], in place."""
        if self._rows:
            forbid(logits, self.which, self.words)


def places_of(rows: list[int], count: int) -> np.ndarray:
    """Return [count] int32: the index in `rows` of each of `count` rows; -1 if absent."""
    places = np.full(count, -1, dtype=np.int32)
    places[rows] = np.arange(len(rows))
    return places


def forbid(logits: Tensor, which: Tensor, words: Tensor) -> None:
    """Set forbidden tokens' logits [S, V] to minus infinity in place, by the fields of `ResidentAllowed`."""
    rows, vocab = logits.shape
    grid = (rows, cdiv(vocab, _BLOCK))
    forbid_kernel[grid](which, words, logits, vocab, words.stride(0), BLOCK=_BLOCK)
