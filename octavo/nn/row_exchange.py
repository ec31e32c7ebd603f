"""`RowExchange`: experts that are divided over ranks with different tokens.

With data-parallel attention, each rank computes the tokens of its own requests, but has only some of the experts that
these choose. So rows of tokens go to the ranks of their experts, and sums of the experts' outputs come back. If all
rows go to all ranks, each rank chooses the experts of all tokens: its router costs less than sending the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.nn.ops.routing import Routing
from octavo.parallel.collectives import Collectives, ExchangingRows, ScatteringSums
from octavo.parallel.mesh import Mesh

Route = Callable[[Tensor], Routing]
"""The experts of tokens x [T, hidden_size]; T may be 0."""
Compute = Callable[[Tensor, Routing], Tensor]
"""The sum of a rank's own experts: [T, hidden_size] for x [T, hidden_size] and the routing of its tokens."""


class RowExchange:
    """All ranks must call the same methods in the same order, with the same `counts`.

    Attributes:
        mesh: the ranks.
        counts: rows of each rank, 0 or more; None if all have as many as this one, as when kernels are tried.
        recordable: whether graphs can record it.
    """

    def __init__(self, mesh: Mesh, *, only_chosen: bool = False) -> None:
        """
        Args:
            only_chosen: send a token only to the ranks of its experts (an all-to-all); else all tokens to all ranks,
                whose outputs are summed by a reduce-scatter.
        """
        self.mesh = mesh
        self.counts: Sequence[int] | None = None
        self.recordable = not only_chosen
        self._only_chosen = only_chosen

    def mix(self, x: Tensor, route: Route, compute: Compute, holders: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of the tokens' experts on all ranks, as a new tensor [T, hidden_size].

        Args:
            x: this rank's tokens [T, hidden_size]; T may be 0.
            holders: which ranks have experts of tokens, [ranks, T] bool for their experts [T, top_k].
        """
        counts = self._counts(x)
        if not sum(counts):
            return torch.empty_like(x)
        if self._only_chosen:
            routing = route(x)
            return self._by_chosen_rows(x, routing, compute, holders(routing.experts))
        rows = self.gathered(x)
        return self._own_sum(compute(rows, route(rows)), counts)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows x [T, ...] of all ranks, in the order of the ranks."""
        return self.mesh.gather_rows(x, self._counts(x))

    def _own_sum(self, y: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over ranks of y, which has the rows of all; y may be overwritten."""
        group, rank, most = self._group, self.mesh.rank, max(counts)
        if not isinstance(group, ScatteringSums):
            own: Tensor = group.all_reduce(y).split(list(counts))[rank]
            return own
        if min(counts) < most:
            padded = y.new_zeros(len(counts), most, *y.shape[1:])
            for into, part in zip(padded, y.split(list(counts)), strict=True):
                into[: len(part)] = part
            y = padded
        return group.reduce_scatter(y.view(len(counts), most, *y.shape[-1:]))[: counts[rank]]

    def _by_chosen_rows(self, x: Tensor, routing: Routing, compute: Compute, chosen: Tensor) -> Tensor:
        """`mix` by two all-to-alls, of rows and of their sums. Reads counts on the host.

        Sums are added up in the order of ranks.
        """
        group, size = self._group, self.mesh.size
        assert isinstance(group, ExchangingRows), "these ranks can't exchange rows"
        rank_of_row, rows = chosen.nonzero(as_tuple=True)
        sent = chosen.sum(1)
        received = group.all_gather(sent)[:, self.mesh.rank].tolist()
        ends = sent.tolist()
        arrived = torch.cat(group.all_to_all(_packed(x, routing)[rows], ends, received))
        own, choices = _unpacked(arrived, x, routing)
        sums = compute(own, choices) if len(own) else own
        back = group.all_to_all(sums.to(x.dtype), received, ends)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for rank in range(size):
            total.index_add_(0, rows[rank_of_row == rank], back[rank].float())
        return total.to(x.dtype)

    def _counts(self, x: Tensor) -> Sequence[int]:
        return [len(x)] * self.mesh.size if self.counts is None else self.counts

    @property
    def _group(self) -> Collectives:
        assert self.mesh.group is not None, "this mesh is for shapes only"
        return self.mesh.group


def _packed(x: Tensor, routing: Routing) -> Tensor:
    """Return each token's row, weights and experts as bytes, [T, B] uint8, so that one message has them all."""
    parts = (x, routing.weights.float(), routing.experts.to(torch.int32))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def _unpacked(packed: Tensor, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """Undo `_packed`, for tokens of the same form as `x` and `routing`."""
    width, top_k = x.shape[1] * x.element_size(), routing.experts.shape[1]
    rows, weights, experts = packed.split([width, 4 * top_k, 4 * top_k], dim=-1)
    found = rows.contiguous().view(x.dtype), weights.contiguous().view(torch.float32)
    return found[0], Routing(found[1], experts.contiguous().view(torch.int32))
