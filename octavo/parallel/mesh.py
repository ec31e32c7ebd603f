"""`Mesh`: the devices that compute one model together, as one of them sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank of a tensor-parallel group, which divides every layer. A group of one moves nothing.

    Attributes:
        rank, size: this rank's number, and how many there are.
        group: what torch calls the group; None is all of the processes it knows.
    """

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x side by side, in the order of ranks: [..., N] to [..., size * N]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


ALONE = Mesh()
