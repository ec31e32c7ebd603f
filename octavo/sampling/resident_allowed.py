"""`allowed.py` on a device: masks at fixed addresses, so that recorded sampling finds each step's own."""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.device.transfer import send
from octavo.sampling.allowed import Allowed, num_words
from octavo.sampling.triton_draw import forbid_kernel

_BLOCK = 4096


class ResidentAllowed:
    """What the rows of the batch that is sampled next may have.

    Attributes:
        which: [rows] int32, where in `words` a row's mask is; -1 if all its tokens are possible.
        words: [rows, `num_words`] int32, as `Allowed.words`.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.which = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.words = torch.zeros(max_rows, num_words(vocab_size), dtype=torch.int32, device=device)
        self._rows: list[int] = []

    def set(self, allowed: Allowed | None) -> None:
        """One transfer, and another where other rows are masked than before; none where none was and none is."""
        rows = [] if allowed is None else list(allowed.rows)
        if rows != self._rows:
            which = np.full(len(self.which), -1, dtype=np.int32)
            which[rows] = np.arange(len(rows))
            send(which, self.which)
            self._rows = rows
        if allowed is not None and rows:
            send(allowed.words, self.words[: len(rows)])

    def forbid(self, logits: Tensor) -> None:
        """Minus infinity for the impossible tokens of logits [S, V], in place."""
        if self._rows:
            rows, vocab = logits.shape
            grid = (rows, triton.cdiv(vocab, _BLOCK))
            forbid_kernel[grid](self.which, self.words, logits, vocab, self.words.stride(0), BLOCK=_BLOCK)
