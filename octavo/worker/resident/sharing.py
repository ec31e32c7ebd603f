"""Group rows of a batch whose contexts begin with the same blocks, for `SharedContexts`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.plan import NewRow


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of rows; each group reads the common prefix of its rows once.

    Attributes:
        groups: [G, 3] int32, as in `SharedContexts`, but lengths in blocks.
        rows: [R] int32, the rows, group by group.
        lens: [R] int32, length of each row's shared prefix, in blocks.
        saved: blocks that need not be read again.
    """

    groups: np.ndarray
    rows: np.ndarray
    lens: np.ndarray
    saved: int

    def padded(self, size: int, most: int, page: int) -> np.ndarray:
        """Pack the groups for a batch of `size` rows; the padding rows are unshared, in groups of at most `most`.

        Args:
            size: rows of the batch, padding included.
            most: most rows in a group.
            page: tokens per block.

        Returns:
            [shared_room(size, most)] int32, for `SharedContexts.of`, with lengths in tokens.
        """
        real = len(self.rows)
        padding = np.arange(real, size, most)
        unshared = np.stack([padding, np.minimum(most, size - padding), np.zeros_like(padding)], axis=1)
        packed = np.zeros(shared_room(size, most), dtype=np.int32)
        groups = np.concatenate([self.groups * (1, 1, page), unshared])
        packed[: groups.size] = groups.ravel()
        packed[-2 * size : -size] = np.concatenate([self.rows, np.arange(real, size)])
        packed[-size : real - size or None] = self.lens * page
        return packed


def shared_room(size: int, most: int) -> int:
    """Return the buffer length for `size` rows: 3 integers per group and 2 per row.

    Unshared rows are grouped by `most`; all other groups have at least two rows.
    """
    return 3 * (size // 2 + -(-size // most)) + 2 * size


class BlockTables:
    """The host's copy of the slots' block tables in one cache group.

    Attributes:
        version: changes when the existing blocks of a context may have changed; appending blocks does not change it.
    """

    def __init__(self, num_slots: int, max_blocks: int, group: int = 0) -> None:
        self._group = group
        self._tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self._ends = np.zeros(num_slots, dtype=np.int64)
        self.version = 0

    def fill(self, row: NewRow) -> None:
        """Set the table of a request that took a slot."""
        blocks = row.blocks[self._group]
        self._tables[row.slot, : len(blocks)] = blocks
        self._ends[row.slot] = len(blocks)
        self.version += 1

    def write(self, writes: Sequence[tuple[int, int, int, int]]) -> None:
        """Apply `StepPlan.block_writes`."""
        slots, groups, indices, blocks = np.asarray(writes, dtype=np.int64).T
        if groups.any() or self._group:
            slots, indices, blocks = (column[groups == self._group] for column in (slots, indices, blocks))
        self._tables[slots, indices] = blocks
        if (indices < self._ends[slots]).any():
            self.version += 1
        np.maximum.at(self._ends, slots, indices + 1)

    def groups(self, slots: Sequence[int], whole_blocks: np.ndarray, most: int, unit: int) -> Groups | None:
        """Return the best grouping of rows with these slots; None if no two contexts share a prefix.

        Args:
            whole_blocks: [R], number of full blocks of each row's context.
            most: most rows in a group.
            unit: shared prefixes are multiples of this many blocks.
        """
        held = np.asarray(slots)
        candidates = held[whole_blocks >= unit]
        if len(np.unique(self._tables[candidates, unit - 1])) == len(candidates):
            return None
        tables = self._tables[held, : int(whole_blocks.max())]
        return grouped(tables, whole_blocks, most, unit)


def grouped(tables: np.ndarray, whole_blocks: np.ndarray, most: int, unit: int) -> Groups | None:
    """Like `BlockTables.groups`, for tables [R, B].

    Sorted by their blocks, rows with common prefixes are adjacent, and a group shares the shortest common prefix of
    adjacent rows. Of all partitions of that order into groups, the one with the fewest blocks to read is chosen.
    """
    order = sorted(range(len(tables)), key=lambda row: tables[row, : whole_blocks[row]].astype(">i4").tobytes())
    common = _common(tables[order], whole_blocks[order]) // unit * unit
    cuts = _best_cuts(common.tolist(), most)
    groups: list[tuple[int, int, int]] = []
    rows: list[int] = []
    lens, saved = np.zeros(len(order), dtype=np.int32), 0
    alone: list[int] = []
    for begin, end in itertools.pairwise(cuts):
        if end - begin == 1:
            alone.append(order[begin])
            continue
        blocks = int(common[begin : end - 1].min())
        groups.append((len(rows), end - begin, blocks))
        rows += order[begin:end]
        lens[order[begin:end]] = blocks
        saved += (end - begin - 1) * blocks
    if not saved:
        return None
    for begin in range(0, len(alone), most):
        unshared = alone[begin : begin + most]
        groups.append((len(rows), len(unshared), 0))
        rows += unshared
    return Groups(np.asarray(groups, dtype=np.int32), np.asarray(rows, dtype=np.int32), lens, saved)


def _common(tables: np.ndarray, whole_blocks: np.ndarray) -> np.ndarray:
    """Return [R - 1]: the number of equal full blocks at the start of each row and the next one."""
    known = np.minimum(whole_blocks[:-1], whole_blocks[1:])
    differs = tables[:-1] != tables[1:]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), tables.shape[1])
    common: np.ndarray = np.minimum(first, known)
    return common


def _best_cuts(common: list[int], most: int) -> list[int]:
    """Return the indices where groups begin, and the end.

    Dynamic programming: best[i] is the most blocks that the first i rows save, begins[i] where their last group begins.
    """
    best, begins = [0], [0]
    for end in range(1, len(common) + 2):
        top, begin = best[end - 1], end - 1
        least = 1 << 30
        for start in range(end - 2, max(-1, end - most - 1), -1):
            least = min(least, common[start])
            if not least:
                break
            saved = best[start] + (end - start - 1) * least
            if saved > top:
                top, begin = saved, start
        best.append(top)
        begins.append(begin)
    cuts = [len(best) - 1]
    while cuts[-1]:
        cuts.append(begins[cuts[-1]])
    return cuts[::-1]
