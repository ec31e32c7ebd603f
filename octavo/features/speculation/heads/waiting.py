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
    """States of each slot's last positions. A head that computes them only when it drafts costs nothing meanwhile."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}
        self._states: dict[int, list[Tensor]] = {}
        self._count: dict[int, int] = {}

    def begin(self, slot: int, num_computed: int) -> None:
        """Start a slot whose first positions the head has computed, for this request or another."""
        self._done[slot], self._states[slot], self._count[slot] = num_computed, [], 0

    def count(self, slot: int) -> int:
        """Return the positions of the slot that are not computed."""
        return self._count[slot]

    def done(self, slot: int) -> int:
        """Return the positions of the slot that are computed."""
        return self._done[slot]

    def add(self, plan: StepPlan, states: Tensor, length: Tensor, left_out: set[int]) -> None:
        """Keep the states of a step's tokens, without those of rejected drafts.

        Args:
            states: [T, places, size], of all tokens of the step; overwritten by the next one.
            length: [slots] known tokens, those just drawn included.
            left_out: slots that never draft.
        """
        begin = 0
        for slot, tokens, samples in zip(plan.slots, plan.num_tokens, plan.samples, strict=True):
            if slot not in left_out:
                before = self._done[slot] + self._count[slot]
                kept = int(length[slot]) - 1 - before if samples else tokens
                self._states[slot].append(states[begin : begin + kept].clone())
                self._count[slot] += kept
            begin += tokens

    def take(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the first states of some slots, one slot after the other, [T, places, size]; they are done now."""
        parts = []
        for slot, count in zip(slots, counts, strict=True):
            if not count:
                continue
            states = torch.cat(self._states[slot])
            parts.append(states[:count])
            self._states[slot] = [states[count:]] if count < len(states) else []
            self._count[slot] -= count
            self._done[slot] += count
        return torch.cat(parts)
