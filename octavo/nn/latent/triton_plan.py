"""The plan of one step's latent attention on a GPU: which rows are computed in which form, and how contexts are
expanded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from octavo.device.transfer import upload_parts
from octavo.nn.attention.triton_few import Few
from octavo.nn.latent.base import LatentSpec, absorbs
from octavo.nn.latent.triton_shapes import tile_queries
from octavo.nn.step import StepInput

EXPANDED_TOKENS = 1024
"""Most tokens of contexts that are expanded at once, in steps with fewer tokens; other steps expand as many as they
have."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """[count, 2] int32: (row, first query of the tile in it)."""

    tiles: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Consecutive positions of some rows' contexts, expanded together.

    Attributes:
        places: [R, 3] int32: first position, length and first expanded token of each row's piece.
        cells: [N] int64, the tokens' cells in the cache; None if they are the step's own tokens.
    """

    places: Tensor
    cells: Tensor | None


@dataclass(frozen=True, slots=True)
class Expanded:
    """Rows in the expanded form: tiles of queries, and the pieces of their contexts, in order."""

    tiles: Tiles
    pieces: Sequence[Pieces]


@dataclass(frozen=True, slots=True)
class LatentLaunches:
    """One step's latent attention.

    Attributes:
        few, many: rows in the absorbed form: with few queries, and in tiles.
        absorbed: the first tokens of the batch, among which are those of all these rows.
    """

    few: Few | None
    many: Tiles | None
    expanded: Expanded | None
    absorbed: int


def divide(
    step: StepInput, counts: np.ndarray, lengths: np.ndarray, queries: int, block_size: int, spec: LatentSpec
) -> LatentLaunches:
    """Plan a step with prompts.

    Args:
        counts, lengths: [R] int32, queries and context of each row, this step's tokens included.
        queries: of an expanded tile.
    """
    ends = np.cumsum(counts)
    forms = np.array([absorbs(int(n), int(length), spec) for n, length in zip(counts, lengths, strict=True)])
    single = np.flatnonzero(counts == 1).astype(np.int32)
    many = np.flatnonzero(forms & (counts > 1))
    wide = np.flatnonzero(~forms & (counts > 1))
    absorbed = np.concatenate([single, many])
    plan = _plan_pieces(wide, counts, lengths, ends - counts, max(EXPANDED_TOKENS, int(ends[-1])))
    tiles = _tiles(many, counts, lengths, tile_queries(spec.num_heads)), _tiles(wide, counts, lengths, queries)
    places = [piece.places.ravel() for piece in plan]
    sent = upload_parts([single, tiles[0].ravel(), tiles[1].ravel(), *places], step.device)
    pieces = [
        Pieces(on_device.view(-1, 3), None if piece.own else _cells(step, piece, block_size))
        for on_device, piece in zip(sent[3:], plan, strict=True)
    ]
    return LatentLaunches(
        Few(sent[0], len(single), 1) if len(single) else None,
        Tiles(sent[1], len(tiles[0])) if len(tiles[0]) else None,
        Expanded(Tiles(sent[2], len(tiles[1])), pieces) if pieces else None,
        int(ends[absorbed].max()) if len(absorbed) else 0,
    )


def _tiles(rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Return [n, 2] int32 tiles of these rows; those with the most keys come first."""
    tiles = [(row, first) for row in rows.tolist() for first in range(0, int(counts[row]), size)]
    tiles.sort(key=lambda tile: -(int(lengths[tile[0]]) - int(counts[tile[0]]) + tile[1]))
    return np.asarray(tiles, dtype=np.int32).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class _HostPieces:
    """`Pieces` on the host, and whether the expanded tokens are the step's own."""

    places: np.ndarray
    own: bool = False


def _plan_pieces(
    rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray, starts: np.ndarray, most: int
) -> list[_HostPieces]:
    """Divide the contexts of these rows into pieces, and these into launches of at most `most` tokens."""
    if not len(rows):
        return []
    places = np.zeros((len(counts), 3), dtype=np.int32)
    if (counts[rows] == lengths[rows]).all():
        places[rows, 1], places[rows, 2] = counts[rows], starts[rows]
        return [_HostPieces(places, own=True)]
    plan, taken = [], 0
    for row in rows.tolist():
        first = 0
        while first < lengths[row]:
            if taken == most:
                plan.append(_HostPieces(places))
                places, taken = np.zeros_like(places), 0
            size = min(int(lengths[row]) - first, most - taken)
            places[row] = first, size, taken
            first, taken = first + size, taken + size
    return [*plan, _HostPieces(places)]


def _cells(step: StepInput, piece: _HostPieces, block_size: int) -> Tensor:
    """Return [N] int64: the cells of a piece's tokens, in order. Nothing is read from the device."""
    used = np.flatnonzero(piece.places[:, 1]).astype(np.int32)
    used = used[np.argsort(piece.places[used, 2])]
    sizes = piece.places[used, 1]
    rows = np.repeat(used, sizes)
    positions = np.concatenate([np.arange(first, first + size) for first, size, _ in piece.places[used]])
    sent_rows, sent_positions = upload_parts([rows, positions.astype(np.int32)], step.device)
    tables = sent_rows if step.table_rows is None else step.table_rows[sent_rows]
    blocks = step.block_tables[tables.long(), (sent_positions // block_size).long()]
    return blocks.long() * block_size + sent_positions % block_size
