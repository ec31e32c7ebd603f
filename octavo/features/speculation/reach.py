"""`Reach`: how far a drafting model's cache is behind the tokens of each slot, as far as the host knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.output import StepOutput
from octavo.core.plan import StepPlan
from octavo.worker.drafts import Ints


class Reach:
    """Bounds per slot. On a GPU the host does not know how many drafts of the steps in flight are accepted.

    Attributes:
        behind: [slots] int64, known tokens that the drafting model has not computed, at most; the last one included.
        length: [slots] int64, known tokens at most.
        unsure: [slots] int64, how many fewer there may be.
    """

    def __init__(self, num_slots: int) -> None:
        self.behind = np.zeros(num_slots, dtype=np.int64)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.unsure = np.zeros(num_slots, dtype=np.int64)
        self._given = np.zeros(num_slots, dtype=np.int64)
        """[slots] tokens that a slot began with and that no plan has computed."""

    def plan(self, plan: StepPlan) -> list[int]:
        """Count a plan's tokens, before it is computed. Return the rows that compute more than what the last one drew:
        all of their tokens are known.

        Without those of recurrent models that compute accepted drafts again: they were inputs of the drafting model.
        """
        for row in plan.new:
            self.length[row.slot], self.unsure[row.slot] = len(row.tokens), 0
            self.behind[row.slot] = self._given[row.slot] = len(row.tokens) - row.num_computed
        prompts = []
        rows = zip(plan.slots, plan.num_tokens, plan.num_drafts, plan.samples, strict=True)
        for number, (slot, tokens, drafts, samples) in enumerate(rows):
            given = self._given[slot]
            if given:
                self._given[slot] = max(0, given - tokens)
                if tokens - drafts > 1:
                    prompts.append(number)
                    self.behind[slot] -= tokens
            if samples:
                self.behind[slot] += 2 if drafts else 1  # the last draft that may be accepted was never an input
                self.length[slot] += 1 + drafts
                self.unsure[slot] += drafts
        return prompts

    def settle(self, plan: StepPlan, output: StepOutput) -> None:
        """Take back the rejected drafts of a plan, whose tokens have arrived."""
        for slot, drafts, tokens in zip(plan.slots, plan.num_drafts, output.tokens, strict=True):
            if drafts:
                self.length[slot] -= 1 + drafts - len(tokens)
                self.unsure[slot] -= drafts

    def of(self, slots: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Return `length`, the least it may be, and `behind` of these slots; at least one token is behind."""
        index = np.asarray(slots, dtype=np.int64)
        least = self.length[index] - self.unsure[index]
        return self.length[index], least, np.minimum(np.maximum(self.behind[index], 1), least)
