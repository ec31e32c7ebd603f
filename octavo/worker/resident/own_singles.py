"""`OwnSingles`: the input of recorded decoding steps in which each rank runs the layers on its own rows (`OwnRows`).

A recording has B rows for each of N ranks: at least as many as the busiest rank needs. Every rank knows all row counts
from the plan, so all replay the same recording and exchange equal numbers of rows. The whole step has N * B rows: the
plan's rows in order, then padding. All ranks embed and sample the whole step, as with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.device.transfer import upload
from octavo.nn.attention.recordable import Recordable
from octavo.nn.step import StepInput
from octavo.worker.own_rows import OwnRows
from octavo.worker.parts import Forward
from octavo.worker.resident.batches import Singles, least, token_counts
from octavo.worker.resident.row_counts import own_sizes, sizes
from octavo.worker.resident.slots import DeviceSlots


def sampled_rows(own: OwnRows | None, max_rows: int) -> int:
    """Return the most rows of logits of a step: of one slot more than there are, or of a recording with its padding."""
    return max([max_rows + 1, *([] if own is None else own_sizes(own.mesh.size, max_rows))])


def product_rows(own: OwnRows | None, max_rows: int, max_tokens: int) -> list[int]:
    """Return the numbers of rows that products of recorded steps have.

    Args:
        own: runs the layers on a rank's own rows; None if ranks divide each layer.
        max_rows, max_tokens: limits of a step.
    """
    if own is None:
        return [*sizes(max_rows), *token_counts(max_tokens)]
    ranks = own.mesh.size
    whole = own_sizes(ranks, max_rows)
    return [*whole, *(size // ranks for size in whole)]


class OwnSingles(Singles):
    """Batches of one token per row, with equally many rows of each rank.

    Attributes:
        sizes: recorded numbers of rows of all ranks, ascending.
    """

    def __init__(self, slots: DeviceSlots, attention: Recordable, own: OwnRows, max_rows: int) -> None:
        ranks = own.mesh.size
        super().__init__(slots, attention, own_sizes(ranks, max_rows), shares=False)
        self._own, self._device = own, slots.device
        largest = self.sizes[-1]
        self._packed = torch.zeros(largest + largest // ranks, dtype=torch.int32, device=slots.device)

    @property
    def forward(self) -> Forward:
        return self._forward

    def _forward(self, x: Tensor, step: StepInput) -> Tensor:
        return self._own.decode(x, step, *self._places(step.num_rows))

    def _places(self, size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows and the order of the whole step's; see `OwnRows.decode`."""
        each = size // self._own.mesh.size
        order, own = self._packed[: size + each].split([size, each])
        return own, order

    def bucket(self, slots: Sequence[int]) -> int:
        ranks, size = self._own.ranks_of(slots), self._own.mesh.size
        return 0 if ranks[0] < 0 else least(self.sizes, size * int(np.bincount(ranks).max()))

    def send(self, slots: Sequence[int], size: int) -> None:
        """Send the slots of a batch, padded up to a recorded size, and the rank of each row.

        A rank with fewer rows than recorded repeats the last row of the step, which then is padding.
        """
        super().send(slots, size)
        mesh, ranks = self._own.mesh, self._own.ranks_of(slots)
        each = size // mesh.size
        order, own = np.zeros(size, dtype=np.int32), np.full(each, size - 1, dtype=np.int32)
        for rank in range(mesh.size):
            rows = np.flatnonzero(ranks == rank)
            order[rows] = rank * each + np.arange(len(rows))
            if rank == mesh.rank:
                own[: len(rows)] = rows
        self._packed[: size + each].copy_(upload(np.concatenate([order, own]), self._device))
