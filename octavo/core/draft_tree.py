"""`DraftTree`: the shape of drafts that branch, as in SpecInfer (https://arxiv.org/abs/2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import StepPlan

LARGEST = 30
"""Maximum drafts of a tree: `unseen` has a bit for each and one for the token itself, in a non-negative int32."""


@dataclass(frozen=True)
class DraftTree:
    """Drafts of one row, stored one after the other. Each follows the row's last known token or another draft.

    Drafts after the same token differ. The first `chain` drafts are a chain, the longest one of the tree: so a row with
    at most `chain` drafts has a chain, and a row with more has the whole tree.

    Attributes:
        parents: for each of N drafts the index of the one before it, which is smaller; -1 for the last known token.
    """

    parents: tuple[int, ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> DraftTree:
        """Return the tree with these paths, one for each draft: the rank of each draft on the way to it, among those
        after the same token.

        Raises:
            ValueError: a path is missing or there twice, a number was left out, the first path is not the longest one,
                or there are too many.
        """
        given = {tuple(path) for path in paths}
        if not given or len(given) < len(paths):
            raise ValueError("each path must be there once")
        if len(given) > LARGEST:
            raise ValueError(f"there can be at most {LARGEST} paths, not {len(given)}")
        for path in sorted(given):
            needed = path[:-1], (*path[:-1], path[-1] - 1)
            missing = next((one for one in needed if one and one[-1] >= 0 and one not in given), None)
            if missing is not None:
                raise ValueError(f"the path {path} needs the path {missing}")
        longest = max(map(len, given))
        chain = [(0,) * depth for depth in range(1, longest + 1)]
        if not given.issuperset(chain):
            raise ValueError(f"the first draft after each token must lead to the deepest one, {chain[-1]}")
        order = [*chain, *sorted(given.difference(chain), key=lambda path: (len(path), path))]
        place = {path: i for i, path in enumerate(order)}
        return cls(tuple(place.get(path[:-1], -1) for path in order))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """[N]: how many drafts lead to each one, itself included."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return np.array(depths)

    @cached_property
    def chain(self) -> int:
        """The longest path, in drafts."""
        return int(self.depths.max())

    @cached_property
    def precedes(self) -> NDArray[np.bool_]:
        """[N, N]: whether draft j is on the way to draft i, itself included."""
        found = np.eye(len(self), dtype=bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                found[i] |= found[parent]
        return found

    @cached_property
    def unseen(self) -> NDArray[np.int32]:
        """[N]: see `StepInput.unseen`."""
        words = [sum(1 << (i - j) for j in range(i) if not self.precedes[i, j]) for i in range(len(self))]
        return np.array(words, dtype=np.int32)

    @cached_property
    def behind(self) -> NDArray[np.int64]:
        """[N]: how many places each draft is stored behind its position."""
        return np.arange(1, 1 + len(self)) - self.depths

    def ahead(self, drafts: int) -> list[int]:
        """Return for the first `drafts` drafts, and for none before them, how many lead to each: [1 + drafts]."""
        return [0, *self.depths[:drafts].tolist()]

    def branches(self, plan: StepPlan) -> bool:
        """Return whether a row of the plan has a tree of drafts."""
        return max(plan.num_drafts, default=0) > self.chain

    def spread(self, values: NDArray[np.int64] | NDArray[np.int32], plan: StepPlan) -> NDArray[np.int32]:
        """Return values of the drafts [N] for all tokens of a plan, [T]; 0 for those that are none."""
        tokens = np.zeros(plan.total_tokens, dtype=np.int32)
        end = 0
        for count, drafts in zip(plan.num_tokens, plan.num_drafts, strict=True):
            end += count
            tokens[end - drafts : end] = values[:drafts]
        return tokens
