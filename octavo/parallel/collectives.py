"""`Collectives`: operations in which all ranks of a group take part, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed
from torch import Tensor


class Collectives(Protocol):
    """Results are the same bits on all ranks, so that each rank draws the same tokens from them."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks and return it; `x` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`, of one shape with at least one dimension, in rank order: [ranks, *x.shape]."""
        ...


@runtime_checkable
class RankSum(Protocol):
    """A sum over ranks that is not computed yet. All ranks must call the same method, once."""

    def total(self) -> Tensor:
        """Return the sum, [T, H], as a new tensor."""
        ...

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        """Add the sum to stream [T, H] in place, and return its RMS norm in a dtype.

        Args:
            norm: its weight and epsilon.
        """
        ...


@runtime_checkable
class SummingLater(Protocol):
    """`Collectives` that can sum in the launch of the norm that follows."""

    def summands(self, x: Tensor) -> RankSum | None:
        """Return the sum of x [T, H] over all ranks; None if it must be computed by itself."""
        ...


class PendingSum(Protocol):
    """A sum over ranks that is being computed."""

    def total(self) -> Tensor:
        """Return the sum; what is launched later finds it there."""
        ...


@runtime_checkable
class BeginningSums(Protocol):
    """`Collectives` that can sum while the device computes."""

    def most_hidden_bytes(self) -> int:
        """Return the most bytes that are summed without slowing other work on the device; 0 for none."""
        ...

    def begin_sum(self, x: Tensor) -> RankSum | PendingSum | None:
        """Begin to sum x over all ranks, which may overwrite it and must not be changed meanwhile; None if that would
        not be done beside computation."""
        ...


@runtime_checkable
class ExchangingRows(Collectives, Protocol):
    """`Collectives` that can send other rows to each rank."""

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        """Send the first `sent[0]` rows of x [N, H] to rank 0, the next `sent[1]` to rank 1, and so on; return what
        each rank has sent here: `received[i]` rows of rank i."""
        ...


@runtime_checkable
class ScatteringSums(Collectives, Protocol):
    """`Collectives` that can give each rank its part of a sum."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum x [ranks, T, ...] over ranks, and return this rank's part [T, ...]; x may be overwritten."""
        ...


def _renamed(name: str, before: str) -> Callable[..., Any]:
    """Return an operation of `torch.distributed` by its name since torch 2.13, where the one `before` warns."""
    found: Callable[..., Any] = getattr(torch.distributed, name, None) or getattr(torch.distributed, before)
    return found


_gather = _renamed("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")


class TorchCollectives:
    """A process group of torch: gloo between CPUs, NCCL between GPUs, where graphs may record the operations.

    Args:
        group: None for the default group of all processes.
        later: `begin_sum` is used.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None, *, later: bool = False) -> None:
        self._group, self._later = group, later
        self._size = torch.distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def most_hidden_bytes(self) -> int:
        return 0  # NCCL takes multiprocessors

    def begin_sum(self, x: Tensor) -> PendingSum | None:
        if not self._later:
            return None
        x = x.contiguous()
        work = torch.distributed.all_reduce(x, group=self._group, async_op=True)
        assert work is not None, "this process is in the group"
        return _TorchSum(x, work)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._size, *x.shape)
        _gather(parts.flatten(0, 1), x.contiguous(), group=self._group)
        return parts

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        rows = x.new_empty(sum(received), *x.shape[1:])
        torch.distributed.all_to_all_single(rows, x.contiguous(), list(received), list(sent), group=self._group)
        return list(rows.split(list(received)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own = x.new_empty(x.shape[1:])
        _reduce_scatter(own, x.contiguous().flatten(0, 1), group=self._group)
        return own


class _TorchSum:
    """A `PendingSum` of a process group. NCCL has a stream of its own."""

    def __init__(self, x: Tensor, work: torch.distributed.Work) -> None:
        self._x, self._work = x, work

    def total(self) -> Tensor:
        self._work.wait()
        return self._x
