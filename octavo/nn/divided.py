"""`DividedLogits`: logits whose columns the ranks divide, and what they exchange to choose tokens from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class DividedLogits:
    """The logits of some rows.

    Attributes:
        own: [S, vocab / ranks], of this rank's tokens.
        mesh: the ranks, which have equal numbers of tokens in the order of their ids.
    """

    own: Tensor
    mesh: Mesh

    @property
    def first(self) -> int:
        """The first of this rank's tokens."""
        return self.mesh.rank * self.own.shape[1]

    def whole(self) -> Tensor:
        """Gather all logits: [S, vocab]."""
        return self.mesh.all_gather(self.own)

    def most_likely(self, count: int) -> Tensor:
        """Gather the most likely tokens, as logits [S, vocab] float32 with minus infinity for most others.

        They contain each row's `count` most likely tokens, of equal ones those with the lowest ids. Waits for the
        result, so it is for logits in host memory. If a rank may have more tokens as likely as the last one of a row,
        all logits are gathered.
        """
        own = self.own.float()
        values, ids = own.max(-1, keepdim=True) if count == 1 else own.topk(min(count + 1, own.shape[1]))
        sent = torch.stack([values.view(torch.int32), ids.int() + self.first])
        found = self.mesh.all_gather(sent)
        values, ids = found[0].view(torch.float32), found[1].long()
        if 1 < count < own.shape[1] and self._ties(values, count):
            return self.whole()
        logits = values.new_full((len(own), own.shape[1] * self.mesh.size), float("-inf"))
        return logits.scatter_(1, ids, values)

    def _ties(self, values: Tensor, count: int) -> bool:
        """Return whether the last value of a rank is as large as the last of a row's `count` largest."""
        last = values.unflatten(1, (self.mesh.size, -1)).amin(-1)
        least = values.topk(count).values[:, -1:]
        return bool((last >= least).any())
