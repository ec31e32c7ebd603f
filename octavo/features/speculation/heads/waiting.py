"""`Waiting`: target's states of tokens that a head has not computed yet, where the host knows how many were kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.plan import StepPlan

MOST_WAITING = 64
"""States of a slot from which on they are computed although nothing is drafted: one pass for all takes hardly longer
than for a single one."""


class Waiting:
    """States of each slot's last positions. A head that computes them only when it drafts costs nothing meanwhile.

    Args:
        rewinds: the target computes a row with a rejected draft again, as recurrent layers require.
    """

    def __init__(self, *, rewinds: bool) -> None:
        self._rewinds = rewinds
        self._next: dict[int, int] = {}
        """Where the target's next row of each slot begins."""
        self._done: dict[int, int] = {}
        self._states: dict[int, list[Tensor]] = {}
        self._count: dict[int, int] = {}

    def begin(self, slot: int, num_computed: int) -> None:
        """Start a slot whose first positions the head has computed, for this request or another."""
        self._next[slot] = self._done[slot] = num_computed
        self._states[slot], self._count[slot] = [], 0

    def count(self, slot: int) -> int:
        """Return the positions of the slot that are not computed."""
        return self._count[slot]

    def done(self, slot: int) -> int:
        """Return the positions of the slot that are computed."""
        return self._done[slot]

    def add(self, plan: StepPlan, states: Tensor, length: Tensor, left_out: set[int]) -> None:
        """Keep the states of a step's tokens, without those of rejected drafts and of tokens that have theirs.

        Args:
            states: [T, places, size], of all tokens of the step; overwritten by the next one.
            length: [slots] known tokens, those just drawn included.
            left_out: slots that never draft.
        """
        begin = 0
        for slot, tokens, samples in zip(plan.slots, plan.num_tokens, plan.samples, strict=True):
            if slot not in left_out:
                first, have = self._next[slot], self._done[slot] + self._count[slot]
                end = int(length[slot]) - 1 if samples else first + tokens
                if end > have:
                    self._states[slot].append(states[begin + have - first : begin + end - first].clone())
                    self._count[slot] += end - have
                if not self._rewinds or end - first == tokens:
                    self._next[slot] = end
            begin += tokens

    def take(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the first states of some slots, one slot after the other, [T, places, size]; they are done now."""
        parts = []
        for slot, count in zip(slots, counts, strict=True):
            if not count:
                continue
            pieces = self._states[slot]
            states = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            parts.append(states[:count])
            self._states[slot] = [states[count:]] if count < len(states) else []
            self._count[slot] -= count
            self._done[slot] += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)
