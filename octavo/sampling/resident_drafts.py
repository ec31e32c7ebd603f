"""Sampling on a device for rows that follow drafts, whose lengths the host does not know.

What depends on a length (bans by `min_tokens`, bad words) is decided on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.device.transfer import upload
from octavo.sampling.resident import Logprobs, ParamTable, ResidentRow, ResidentSampler
from octavo.sampling.resident_bans import allow


@dataclass(slots=True)
class DraftRow(ResidentRow):
    """A row of logits whose length is between `num_tokens` and `num_tokens + unsure`."""

    unsure: int = 0

    @property
    def most_tokens(self) -> int:
        return self.num_tokens + self.unsure


class DraftSampler(ResidentSampler):
    """A `ResidentSampler` over virtual slots, one per row of logits, whose lengths include the drafts before it."""

    def __init__(self, table: ParamTable, vocab_size: int, max_rows: int) -> None:
        """`table`: parameters of the slots; `max_rows`: most rows of logits in a step."""
        super().__init__(table, vocab_size, max_rows)
        self._slots = table

    def sample_drafted(
        self, logits: Tensor, slots: Tensor, ahead: Tensor, rows: Sequence[DraftRow]
    ) -> tuple[Tensor, Logprobs]:
        """Sample as `sample` does.

        Args:
            slots: [S] int32, slot of each row of logits.
            ahead: [S] int32, number of drafts before each row.
            rows: S rows; the `slot` of each is its index.
        """
        of, table = slots.long(), self._slots
        reads = any(row.params.bad_words or row.params.changes for row in rows)
        tokens = table.tokens[of] if reads else table.tokens
        self._table = ParamTable(table.params[of], tokens, table.length[of] + ahead)
        return self.sample(logits, torch.arange(len(of), dtype=torch.int32, device=of.device), rows)

    def _forbid(self, work: Tensor, rows: Sequence[ResidentRow]) -> None:
        allow(work, rows)
        words = [(i, word) for i, row in enumerate(rows) for word in row.params.bad_words]
        if not words:
            return
        longest = max(len(word) for _, word in words) - 1
        wanted = np.full((len(words), longest), -1, dtype=np.int64)
        for j, (_, word) in enumerate(words):
            wanted[j, longest - len(word) + 1 :] = word[:-1]
        held = upload(np.array([[i, len(word) - 1, rows[i].num_prompt, word[-1]] for i, word in words]), work.device)
        index, count, prompt, last = held.unbind(1)
        length = self._table.length[index].long()
        places = length[:, None] - longest + torch.arange(longest, device=work.device)
        seen = self._table.tokens[index[:, None], places.clamp_(min=0)]
        expected = upload(wanted, work.device)
        begun = ((seen == expected) | (expected < 0)).all(1) & (length - prompt >= count)
        _forbid_where(work, index, last, begun)

    def _ban(self, work: Tensor, rows: Sequence[ResidentRow]) -> None:
        early = [(i, row) for i, row in enumerate(rows) if row.banned is not None]
        if not early:
            return
        banned = [[i, token, r.num_prompt + r.params.min_tokens] for i, r in early for token in r.params.banned_ids]
        index, token, least = upload(np.array(banned, dtype=np.int64), work.device).unbind(1)
        _forbid_where(work, index, token, self._table.length[index] < least)


def _forbid_where(work: Tensor, rows: Tensor, tokens: Tensor, where: Tensor) -> None:
    """Set the logits of tokens [n] in rows [n] to minus infinity, in place, where `where` [n] is true."""
    # Added, not set: if a token has two entries, one that is false must not undo the other.
    values = work.new_zeros(len(rows)).masked_fill_(where, float("-inf"))
    work.view(-1).index_add_(0, rows * work.shape[1] + tokens, values)
