"""Sums over ranks that have only some rows each: an all-to-all of these rows, then a gather."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from octavo.parallel.collectives import ExchangingRows
from octavo.parallel.mesh import Mesh


def sum_rows(x: Tensor, present: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over ranks of x [T, H], as a new tensor, the same on all of them. Reads counts on the host.

    Each rank adds up an equal part of the rows, in float32 and in the order of ranks. It receives what others have of
    them, and sends its sums to all. For a fraction s of the rows on each rank, it sends (1 + s) / 2 of an all-reduce's
    bytes.

    Args:
        present: [ranks, T] bool, equal on all ranks: which rows of x a rank has. Its other rows are not read.
    """
    group = mesh.group
    assert isinstance(group, ExchangingRows), "these ranks can't exchange rows"
    rank, ranks, tokens = mesh.rank, mesh.size, x.shape[0]
    each = max(1, -(-tokens // ranks))
    starts = [min(tokens, owner * each) for owner in range(ranks + 1)]
    counts = torch.stack([present[:, a:b].sum(1) for a, b in pairwise(starts)], 1).tolist()
    received = group.all_to_all(x[present[rank]], counts[rank], [row[rank] for row in counts])
    total = x.new_zeros(each, x.shape[1], dtype=torch.float32)
    own = present[:, starts[rank] : starts[rank + 1]]
    for has, rows in zip(own, received, strict=True):
        total[: own.shape[1]][has] += rows.float()
    return group.all_gather(total.to(x.dtype)).flatten(0, 1)[:tokens]
