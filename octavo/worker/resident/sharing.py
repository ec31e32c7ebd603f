"""Which rows of a batch have contexts that begin with the same blocks: what `SharedContexts` tells a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.plan import NewRow


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in groups, each of which reads what its rows have in common once.

    Attributes:
        groups: [G, 3] int32, as `SharedContexts` has them, but in blocks.
        rows: [R] int32.
        lens: [R] int32, in blocks.
        saved: blocks that need not be read again.
    """

    groups: np.ndarray
    rows: np.ndarray
    lens: np.ndarray
    saved: int

    def padded(self, size: int, most: int, page: int) -> np.ndarray:
        """For a batch of `size` rows, of which those beyond this one's are strangers in groups of at most so many.

        Returns:
            [shared_room(size, most)] int32, for `SharedContexts.of`: the numbers of blocks are of tokens there.
        """
        real = len(self.rows)
        padding = np.arange(real, size, most)
        strangers = np.stack([padding, np.minimum(most, size - padding), np.zeros_like(padding)], axis=1)
        packed = np.zeros(shared_room(size, most), dtype=np.int32)
        groups = np.concatenate([self.groups * (1, 1, page), strangers])
        packed[: groups.size] = groups.ravel()
        packed[-2 * size : -size] = np.concatenate([self.rows, np.arange(real, size)])
        packed[-size : real - size or None] = self.lens * page
        return packed


def shared_room(size: int, most: int) -> int:
    """Numbers that tell of `size` rows: three a group and two a row. Strangers stand `most` together, and all other
    groups have two rows or more."""
    return 3 * (size // 2 + -(-size // most)) + 2 * size


class BlockTables:
    """The host's copy of the slots' block tables.

    Attributes:
        version: another one once contexts may begin with other blocks than before; blocks that are only appended leave
            it as it is.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self._tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self._ends = np.zeros(num_slots, dtype=np.int64)
        self.version = 0

    def fill(self, row: NewRow) -> None:
        """A request took a slot."""
        self._tables[row.slot, : len(row.blocks[0])] = row.blocks[0]
        self._ends[row.slot] = len(row.blocks[0])
        self.version += 1

    def write(self, writes: Sequence[tuple[int, int, int, int]]) -> None:
        """Take in `StepPlan.block_writes`."""
        slots, _, indices, blocks = np.asarray(writes, dtype=np.int64).T
        self._tables[slots, indices] = blocks
        if (indices < self._ends[slots]).any():
            self.version += 1
        np.maximum.at(self._ends, slots, indices + 1)

    def groups(self, slots: Sequence[int], whole_blocks: np.ndarray, most: int, unit: int) -> Groups | None:
        """How rows with these slots are best grouped; None if no two begin alike.

        Args:
            whole_blocks: [R], how many blocks each row's context has filled.
            most: rows in a group.
            unit: what a group shares is a multiple of so many blocks.
        """
        held = np.asarray(slots)
        candidates = held[whole_blocks >= unit]
        if len(np.unique(self._tables[candidates, unit - 1])) == len(candidates):
            return None
        tables = self._tables[held, : int(whole_blocks.max())]
        return grouped(tables, whole_blocks, most, unit)


def grouped(tables: np.ndarray, whole_blocks: np.ndarray, most: int, unit: int) -> Groups | None:
    """As `BlockTables.groups`, of tables [R, B].

    In the order of their blocks, rows that begin alike are neighbours, and what a group shares is the least that two
    neighbours do. Among all ways to cut that order in groups, the one is taken that leaves the fewest blocks to read.
    """
    order = sorted(range(len(tables)), key=lambda row: tables[row, : whole_blocks[row]].astype(">i4").tobytes())
    common = _common(tables[order], whole_blocks[order]) // unit * unit
    cuts = _best_cuts(common.tolist(), most)
    groups, rows, lens, saved = [], [], np.zeros(len(order), dtype=np.int32), 0
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
        strangers = alone[begin : begin + most]
        groups.append((len(rows), len(strangers), 0))
        rows += strangers
    return Groups(np.asarray(groups, dtype=np.int32), np.asarray(rows, dtype=np.int32), lens, saved)


def _common(tables: np.ndarray, whole_blocks: np.ndarray) -> np.ndarray:
    """[R - 1], with how many equal blocks each row and the next one begin, both filled."""
    known = np.minimum(whole_blocks[:-1], whole_blocks[1:])
    differs = tables[:-1] != tables[1:]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), tables.shape[1])
    return np.minimum(first, known)


def _best_cuts(common: list[int], most: int) -> list[int]:
    """Where groups begin, and the end. best[i] is what the first i rows save at most, from[i] where their last group
    begins."""
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
