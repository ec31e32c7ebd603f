"""`Mesh`: one rank's view of the devices that compute one model together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank of a tensor-parallel group, which shards every layer. A group of one communicates nothing.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        group: torch's process group; None for the default group of all processes.
    """

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place, and return it."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate all ranks' `x` along the last dimension, in rank order: [..., N] to [..., size * N]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


ALONE = Mesh()
