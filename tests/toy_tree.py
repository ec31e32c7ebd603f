"""A feature that drafts trees, for tests: the right tokens lie on a path that differs each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from toy_drafter import DrafterEngine, DrafterWorker

from octavo.core.draft_tree import DraftTree
from octavo.schedule.request import Request
from octavo.worker.drafts import Drafting, Drafts

TREE = DraftTree.of([(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0), (1, 0, 0)])


class TreeEngine(DrafterEngine):
    """Asks for whole trees, for chains, and now and then for nothing. Notes how many drafts were verified at once."""

    def __init__(self, tree: DraftTree = TREE, seed: int = 0) -> None:
        super().__init__(len(tree), seed)
        self.max_chain = tree.chain
        self.verified: list[tuple[int, int]] = []

    def drafts(self, request: Request) -> int | None:
        asked = self._random.random()
        return None if asked < 0.7 else self._random.randint(0, self.max_drafts)

    def on_verify(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        super().on_verify(request, num_drafts, num_accepted)
        self.verified.append((num_drafts, num_accepted))


class TreeWorker(DrafterWorker):
    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, tree: DraftTree = TREE, right: float = 0.85) -> None:
        super().__init__(texts, vocab, right)
        self.tree = tree
        self.proposed: list[list[int]] = []
        """The limits of each step's rows."""

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        assert self.tree is not None
        limits = drafting.limits.tolist()
        self.proposed.append(limits)
        rows = []
        for slot, limit in zip(drafting.slots.tolist(), limits, strict=True):
            assert limit <= self.tree.chain or limit == len(self.tree), "a tree is whole"
            right = self._guess(drafting, slot, self.tree.chain)
            rows.append(self._branched(right) if limit > self.tree.chain else right + [0] * len(self.tree))
        width = max(limits)
        tokens = torch.tensor([row[:width] for row in rows], device=drafting.slots.device)
        return Drafts(tokens, drafting.limits)

    def _branched(self, right: list[int]) -> list[int]:
        """Return drafts with the right tokens on the path to one of them, and others elsewhere."""
        assert self.tree is not None
        chosen, tokens = self._random.randrange(len(self.tree)), [-1] * len(self.tree)
        for i in range(len(tokens)):
            if self.tree.precedes[chosen, i]:
                tokens[i] = right[self.tree.depths[i] - 1]
        for i, parent in enumerate(self.tree.parents):
            taken = {tokens[j] for j, other in enumerate(self.tree.parents) if other == parent}
            while tokens[i] < 0:
                token = self._random.randrange(self._vocab)
                tokens[i] = -1 if token in taken else token
        return tokens
