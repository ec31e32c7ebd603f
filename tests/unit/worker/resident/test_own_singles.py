"""Recorded steps have equally many rows of each rank: those of its requests, then padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.triton import TritonAttention
from octavo.parallel.mesh import Mesh
from octavo.worker.resident.own_singles import OwnSingles
from octavo.worker.resident.row_counts import own_sizes
from octavo.worker.resident.slots import DeviceSlots

RANKS = torch.tensor([0, 1, 0, 2, 1, 0, -1]).numpy()
"""Of each slot."""
NUM_SLOTS = 7


def batches(ranks: int) -> list[OwnSingles]:
    """Each rank's. What they run returns the rows of the rank, and the order of all rows."""
    slots = DeviceSlots(NUM_SLOTS, 16, 4, 32, torch.device("cpu"))
    attention = TritonAttention(torch.float32, AttentionSpec(2, 1, 16, 0.25))
    made = []
    for rank in range(ranks):
        own: Any = SimpleNamespace(
            mesh=Mesh(rank, ranks), ranks_of=RANKS.__getitem__, decode=lambda x, step, own, order: (own, order)
        )
        made.append(OwnSingles(slots, attention, own, NUM_SLOTS))
    return made


@pytest.mark.parametrize(
    ("held", "size"), [([4, 0, 3, 5, 2], 12), ([2], 3), ([5, 1], 3), ([5, 0, 2], 12), ([1, 4, 3, 2], 6)], ids=str
)
def test_rows_of_each_rank(held: list[int], size: int) -> None:
    ranks = batches(3)
    given = []
    for rank, singles in enumerate(ranks):
        assert singles.bucket(held) == size
        singles.send([0, 1, 2, 3, 4, 5], 18)  # more than now
        singles.send(held, size)
        forward: Any = singles.forward
        own, order = forward(torch.empty(0), singles.step(size, shares=False))
        rows = singles.rows[:size]
        assert rows.tolist() == held + [NUM_SLOTS] * (size - len(held))
        given += rows[own].tolist()
        assert len(own) == size // 3
        assert {RANKS[slot] for slot in given[rank * len(own) :] if slot < NUM_SLOTS} <= {rank}
    assert sorted(given) == sorted(held + [NUM_SLOTS] * (size - len(held)))
    assert [given[place] for place in order[: len(held)].tolist()] == held


def test_what_is_not_recorded() -> None:
    """Rows of all ranks, as in a warm-up, and more rows of a rank than were recorded."""
    singles = batches(3)[0]
    assert singles.bucket([6]) == 0
    singles.sizes = [3, 6]
    assert singles.bucket([1, 4, 0]) == 6
    assert singles.bucket([0, 2, 5]) == 0


@pytest.mark.parametrize(
    ("ranks", "max_rows", "expected"), [(2, 8, [2, 4, 8, 16]), (3, 8, [3, 6, 12, 18]), (4, 1, [4])]
)
def test_sizes(ranks: int, max_rows: int, expected: list[int]) -> None:
    """Equal numbers of rows of each rank, up to twice its equal share."""
    assert own_sizes(ranks, max_rows) == expected
