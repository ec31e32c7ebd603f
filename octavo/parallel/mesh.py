"""`Mesh`: one rank's view of the devices that compute one model together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from octavo.native.exchange import Exchange
from octavo.parallel.collectives import BeginningSums, Collectives, PendingSum, RankSum, SummingLater
from octavo.parallel.shared import SharedMemory


def _offers(group: object, protocol: Any) -> bool:
    """Return whether a group has the methods of a protocol. `isinstance` would take as long as two launches, in each
    layer."""
    kind: Any = type(group)
    return _has_methods(kind, protocol)


@functools.cache
def _has_methods(kind: Any, protocol: Any) -> bool:
    return issubclass(kind, protocol)


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank of a tensor-parallel group, which shards every layer. A group of one communicates nothing.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        group: None if only shapes are needed.
        context: the ranks with the same part of each layer, which divide the tokens of large steps; None if there is
            one.
    """

    rank: int = 0
    size: int = 1
    group: Collectives | None = None
    context: Mesh | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks and return it; `x` may be overwritten."""
        return x if self.size == 1 else self._joined.all_reduce(x)

    def sum_later(self, x: Tensor) -> RankSum | None:
        """Return the sum of x [T, H] over all ranks for a norm's launch to compute; None if only `all_reduce` can."""
        group = self.group
        return cast(SummingLater, group).summands(x) if _offers(group, SummingLater) else None

    def begin_sum(self, x: Tensor) -> RankSum | PendingSum | None:
        """Begin to sum x over all ranks while the device computes, which may overwrite x; None if it can't."""
        group = self.group
        return cast(BeginningSums, group).begin_sum(x) if _offers(group, BeginningSums) else None

    def most_hidden_bytes(self) -> int:
        """Return the most bytes that are summed without slowing other work on the device; 0 for none."""
        group = self.group
        return cast(BeginningSums, group).most_hidden_bytes() if _offers(group, BeginningSums) else 0

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate all ranks' `x` along the last dimension, in rank order: [..., N] to [..., size * N]."""
        return x if self.size == 1 else torch.cat(self._joined.all_gather(x).unbind(), dim=-1)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate all ranks' rows, in rank order: [counts[rank], ...] to [sum of counts, ...]. If no rank has any,
        nothing is exchanged."""
        most = max(counts)
        if not most:
            return x
        if len(x) < most:
            own = x
            x = own.new_empty(most, *own.shape[1:])
            x[: len(own)] = own
        parts = self._joined.all_gather(x)
        if min(counts) == most:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def of_first(self, data: bytes, device: torch.device) -> bytes:
        """Return the data of the first rank, on each. The other ranks' may be anything.

        Args:
            device: on which the ranks exchange tensors.
        """
        sizes = self._numbers(len(data), device)
        room = torch.zeros(-(-max(sizes) // 4096) + 1, 1024, dtype=torch.int32)
        room.view(torch.uint8).flatten()[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = self._joined.all_gather(room.to(device))[0]
        return found.cpu().view(torch.uint8).flatten()[: sizes[0]].numpy().tobytes()

    def largest(self, number: int, device: torch.device) -> int:
        """Return the largest of the ranks' numbers, on each. See `of_first`."""
        return max(self._numbers(number, device))

    def _numbers(self, own: int, device: torch.device) -> list[int]:
        sent = torch.full((16,), own, dtype=torch.int32, device=device)  # as many words as the memory of peers takes
        found: list[int] = self._joined.all_gather(sent)[:, 0].tolist()
        return found

    @property
    def shares_memory(self) -> bool:
        """Whether native programs can contain the sums over ranks."""
        return isinstance(self.group, SharedMemory)

    @property
    def exchange(self) -> Exchange:
        """What sums over ranks use in native programs; only with `shares_memory`."""
        assert isinstance(self.group, SharedMemory), "the ranks share no memory"
        return self.group.exchange

    @property
    def _joined(self) -> Collectives:
        assert self.group is not None, "this mesh is for shapes only"
        return self.group


ALONE = Mesh()
