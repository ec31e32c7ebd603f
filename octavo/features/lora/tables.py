"""What kernels read about adapters: tensors at fixed addresses, filled before each step.

Two kinds: `Tables`, with a row for each adapter in use, changed when one comes into use; and `Batch`, which says which
adapter each row of a step has, changed when the step's rows change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.device.transfer import Link
from octavo.features.lora.layout import Geometry, Layout, Target

TILE_ROWS = 8
"""Most rows of a tile: rows of one adapter, for which a kernel reads its weights once."""

RANKS = 16
"""Ranks that kernels multiply at once, the least that the matrix units take."""

_RANKS_COST, _PLAIN_COST = 5, 2
"""What the second half takes for RANKS ranks of some outputs of a tile, and for these outputs of rows without ranks."""

NONE = -1
"""No adapter; an unused tile."""

A, B, RANK, GAIN = range(4)
"""Columns of `Tables.meta`: `Span.a`, `Span.b`, `Span.rank`, `Span.gain`."""


def most_tiles(rows: int, adapters: int) -> int:
    """Return the most tiles of a step with this many rows, of at most this many adapters."""
    return rows if rows <= adapters else adapters + (rows - adapters) // TILE_ROWS


class Tables:
    """Where the weights of each adapter are. An adapter in use has an index, below `max_adapters`.

    Attributes:
        blocks: [max_adapters, max_blocks] int32, the blocks of each adapter, in the order of its range.
        meta: [targets, max_adapters, parts, 4] int32, the places of its pieces: see `Span`. Parts that it does not
            change have rank 0. A layer's kernels get `meta[target]`.
        layouts: the layout of each adapter in use, by its index.
        rank_groups: [max_adapters], into how many groups of RANKS the largest rank of an adapter's pieces is divided.
    """

    def __init__(
        self, targets: Sequence[Target], geometry: Geometry, max_adapters: int, max_blocks: int, link: Link
    ) -> None:
        self.geometry = geometry
        self.max_adapters = max_adapters
        self.layouts: dict[int, Layout] = {}
        self.lists: dict[int, tuple[int, ...]] = {}
        """The blocks of each adapter in use, on the host."""
        self.rank_groups = np.zeros(max_adapters, dtype=np.int64)
        self._link = link
        parts = max((len(target.parts) for target in targets), default=1)
        self.blocks = torch.zeros(max_adapters, max_blocks, dtype=torch.int32, device=link.torch_device)
        shape = (len(targets), max_adapters, parts, 4)
        self.meta = torch.tensor(_ABSENT, dtype=torch.int32, device=link.torch_device).expand(shape).contiguous()

    def enter(self, index: int, blocks: Sequence[int], layout: Layout) -> None:
        """Use an index for an adapter from the next step on."""
        self.layouts[index], self.lists[index] = layout, tuple(blocks)
        self.rank_groups[index] = -(-max((span.rank for span in layout.spans.values()), default=0) // RANKS)
        self.blocks[index, : len(blocks)].copy_(self._link.upload(np.array(blocks, dtype=np.int32)))
        targets, _, parts, _ = self.meta.shape
        table = np.empty((targets, parts, 4), dtype=np.int32)
        table[:] = _ABSENT
        for (target, part), span in layout.spans.items():
            table[target, part] = span.a, span.b, span.rank, span.gain
        self.meta[:, index].copy_(self._link.upload(table))


class Assigned:
    """Which adapter each row of a step's tokens, or of its logits, has.

    Attributes:
        adapter: [max_rows] int32, each row's adapter; NONE for the base model, and past the step's rows.
        tiles: [most_tiles(max_rows, max_adapters), 1 + TILE_ROWS] int32: an adapter and rows that have it, then NONE.
            Entries past those in use are arbitrary. A step of n rows, including padding, uses at most
            `most_tiles(n, max_adapters)` of them.
        work: [1 + 3 n] int32: the number of entries, then an entry for each group of RANKS of each tile's adapter: the
            tile, the adapter, the group. Arbitrary past those.
        ends: [most_tiles(max_rows, max_adapters)] int32: what the second half takes for the tiles up to the end of each
            one; past those in use, as much as for all.
        rest: [max_rows / TILE_ROWS] int32: the same for rows without an adapter, where it computes them, too; by
            TILE_ROWS rows.
        groups: adapter -> its rows, on the host.
    """

    def __init__(self, max_rows: int, max_adapters: int, link: Link, most_groups: int = 1) -> None:
        """
        Args:
            most_groups: of ranks of an adapter.
        """
        device = link.torch_device
        self._link = link
        self.adapter = torch.full((max_rows,), NONE, dtype=torch.int32, device=device)
        shape = most_tiles(max_rows, max_adapters), 1 + TILE_ROWS
        self.tiles = torch.full(shape, NONE, dtype=torch.int32, device=device)
        self.work = torch.zeros(1 + 3 * most_groups * shape[0], dtype=torch.int32, device=device)
        self.ends = torch.zeros(shape[0], dtype=torch.int32, device=device)
        self.rest = torch.zeros(-(-max_rows // TILE_ROWS), dtype=torch.int32, device=device)
        self.groups: dict[int, NDArray[np.int64]] = {}
        self._filled = 0

    def fill(self, adapters: NDArray[np.int32], rank_groups: NDArray[np.int64]) -> None:
        """Set the adapter of each row [n]; NONE for the base model.

        Args:
            rank_groups: of `Tables`.
        """
        tiles, self.groups = grouped(adapters)
        before, self._filled = self._filled, len(adapters)
        rest = np.full(max(0, before - len(adapters)), NONE, dtype=np.int32)
        self._send(self.adapter, np.concatenate([adapters, rest]))
        self._send(self.tiles, tiles)
        self._send(self.work, work_of(tiles[:, 0], rank_groups))
        self._send(self.ends, ends_of(np.maximum(rank_groups[tiles[:, 0]], 1) * _RANKS_COST, len(self.ends)))
        missing = np.full((len(self.rest), TILE_ROWS), NONE)
        missing.ravel()[: len(adapters)] = adapters
        self._send(self.rest, ends_of((missing == NONE).any(axis=1) * _PLAIN_COST, len(self.rest)))

    def _send(self, into: Tensor, values: NDArray[np.int32]) -> None:
        if len(values):
            into[: len(values)].copy_(self._link.upload(values))


class Batch:
    """The rows of one step.

    Attributes:
        tokens: adapters of the step's tokens.
        logits: adapters of the rows that get logits, in their order.
        chosen: late layers compute the rows of `logits` only.
    """

    def __init__(self, max_rows: int, max_adapters: int, link: Link, most_groups: int = 1) -> None:
        self.tokens = Assigned(max_rows, max_adapters, link, most_groups)
        self.logits = Assigned(max_rows, max_adapters, link, most_groups)
        self.chosen = False

    def of(self, target: Target) -> Assigned:
        """Return the adapters of a layer's rows in the step that is being computed or recorded."""
        return self.logits if target.head or (target.late and self.chosen) else self.tokens


def grouped(adapters: NDArray[np.int32]) -> tuple[NDArray[np.int32], dict[int, NDArray[np.int64]]]:
    """Return the used `tiles`, and `groups`, of `Assigned` for the adapters of some rows."""
    order = np.argsort(adapters, kind="stable")
    order = order[np.searchsorted(adapters[order], 0) :]  # those of the base come first
    used, starts, counts = np.unique(adapters[order], return_index=True, return_counts=True)
    groups = {
        index: order[start : start + count]
        for index, start, count in zip(used.tolist(), starts.tolist(), counts.tolist(), strict=True)
    }
    tiles_of = -(-counts // TILE_ROWS)
    owner = np.repeat(np.arange(len(used)), tiles_of)
    first = (np.arange(len(owner)) - (tiles_of.cumsum() - tiles_of)[owner]) * TILE_ROWS
    within = first[:, None] + np.arange(TILE_ROWS)
    places = np.minimum(starts[owner, None] + within, len(order) - 1)
    rows = np.where(within < counts[owner, None], order[places], NONE)
    return np.column_stack([used[owner], rows]).astype(np.int32), groups


def work_of(adapters: NDArray[np.int32], rank_groups: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return `Assigned.work` for the adapters of tiles."""
    counts = rank_groups[adapters]
    tiles = np.repeat(np.arange(len(adapters)), counts)
    groups = np.arange(len(tiles)) - np.repeat(counts.cumsum() - counts, counts)
    return np.concatenate([[len(tiles)], np.column_stack([tiles, adapters[tiles], groups]).ravel()]).astype(np.int32)


def ends_of(costs: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    """Return the sums of costs up to each one, then the last sum: [count]."""
    return np.pad(costs.cumsum(), (0, count - len(costs)), "edge" if len(costs) else "constant").astype(np.int32)


_ABSENT = (-1, -1, 0, -1)
