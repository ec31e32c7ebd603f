"""`StepShape`: what decides how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.plan import StepPlan


class StepShape(NamedTuple):
    """
    Attributes:
        tokens: computed in the step.
        sampled: rows that get a token.
        keys: cached positions that the rows of one token read, over these rows; the mean of all layers.
        pairs: pairs of a token and a position that it attends to, over the rows of more tokens.
        decodes: no row has more than one token.
    """

    tokens: int
    sampled: int
    keys: float
    pairs: float
    decodes: bool


class ShapeReader:
    """Reads the shapes of successive plans. It follows how far the sequence in each slot is computed.

    Attributes:
        ends: slot -> positions that are computed once the last read plan has run.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.ends: dict[int, int] = {}
        layers = sum(len(group.layers) or 1 for group in groups) or 1
        self._reads = [
            (group.window if group.kind is GroupKind.WINDOW else 0, (len(group.layers) or 1) / layers)
            for group in groups
            if group.grows
        ]
        """(window, or 0 without one; share of the layers) of the layers that read earlier positions."""

    def read(self, plan: StepPlan) -> StepShape:
        ends = self.ends
        for row in plan.new:
            ends[row.slot] = row.num_computed
        single, keys, pairs = True, 0.0, 0.0
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            start = ends[slot]
            ends[slot] = start + count
            if count == 1:
                keys += self._pairs(start, 1)
            else:
                single = False
                pairs += self._pairs(start, count)
        return StepShape(sum(plan.num_tokens), sum(plan.samples), keys, pairs, single)

    def _pairs(self, start: int, count: int) -> float:
        """Return the pairs of `count` tokens from position `start` on, as a mean of the layers."""
        return sum(share * _attended(start, count, window) for window, share in self._reads)


def _attended(start: int, count: int, window: int) -> int:
    growing = count if not window else max(0, min(count, window - start))
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window
