"""`Collectives`: operations in which all ranks of a group take part, in the same order."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed
from torch import Tensor


class Collectives(Protocol):
    """Results are the same bits on all ranks, so that each rank draws the same tokens from them."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks and return it; `x` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' `x`, of one shape with at least one dimension, in rank order."""
        ...


class TorchCollectives:
    """A process group of torch: gloo between CPUs, NCCL between GPUs, where graphs may record the operations.

    Args:
        group: None for the default group of all processes.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self._size = torch.distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        torch.distributed.all_gather_into_tensor(parts, x, group=self._group)
        return list(parts.chunk(self._size))
