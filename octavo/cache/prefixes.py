"""How much of a cached prefix a sequence can begin with, when each group of layers needs other parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from octavo.cache.prefix_tree import Node
from octavo.core.cache_groups import NO_BLOCK, CacheGroup, GroupKind


@dataclass(frozen=True, slots=True)
class Extension:
    """A prefix with some blocks in the cache and the others in a tier.

    Attributes:
        num_tokens: its length.
        rows: the cached blocks by group, as in a `BlockTable`; NO_BLOCK for the others.
        missing: (group, entry of its row, index in the sequence) of the blocks to load.
    """

    num_tokens: int
    rows: list[list[int]]
    missing: list[tuple[int, int, int]]


def tail(group: CacheGroup, length: int, size: int) -> int:
    """How many of `length` leading blocks of `size` tokens, counted from their end, the next token reads."""
    if not group.grows:
        return 1
    return length - group.first_read(length * size) // size


def shared_row(group: CacheGroup, i: int, path: Sequence[Node], size: int) -> list[int]:
    """Return the row of group number `i` in a table that begins with this path of the tree."""
    if not group.grows:
        return [path[-1].blocks[i]] if path else []
    first = len(path) - tail(group, len(path), size)
    return [NO_BLOCK] * first + [node.blocks[i] for node in path[first:]]


def longest(groups: Sequence[CacheGroup], size: int, blocks: Iterable[Sequence[bool]]) -> int:
    """Return the longest prefix, in blocks, from which every group can go on.

    Args:
        blocks: for each block of the prefix, which groups have it.
    """
    runs = [0] * len(groups)  # blocks in a row, up to the one at hand, that the group has
    usable = 0
    for length, found in enumerate(blocks, start=1):
        runs = [run + 1 if there else 0 for run, there in zip(runs, found, strict=True)]
        if all(run >= tail(group, length, size) for run, group in zip(runs, groups, strict=True)):
            usable = length
    return usable


def extension(
    groups: Sequence[CacheGroup],
    size: int,
    path: Sequence[tuple[Node, Sequence[bool]]],
    most: int,
    loadable: Callable[[int, int], bool],
) -> Extension | None:
    """Return the longest prefix that can be had by loading blocks; None if nothing can be loaded for it.

    Args:
        path: the tree's nodes along the prefix, and for each which groups can use its block.
        most: its blocks at most.
        loadable: whether the block of (group, index in the sequence) can be loaded.
    """
    length = longest(groups, size, _reachable(groups, [found for _, found in path], most, loadable))
    rows, missing = [], []
    for i, group in enumerate(groups):
        first = max(0, length - tail(group, length, size))
        row = [NO_BLOCK] * first if group.grows else []
        for index in range(first, length):
            here = index < len(path) and path[index][1][i]
            if not here:
                missing.append((i, len(row), index))
            row.append(path[index][0].blocks[i] if here else NO_BLOCK)
        rows.append(row)
    return Extension(length * size, rows, missing) if missing else None


def _reachable(
    groups: Sequence[CacheGroup], path: Sequence[Sequence[bool]], most: int, loadable: Callable[[int, int], bool]
) -> Iterator[list[bool]]:
    """For each block of a prefix, which groups have or can load it; ends where a FULL group neither has nor can."""
    nowhere = [False] * len(groups)
    for index in range(most):
        found = path[index] if index < len(path) else nowhere
        there = [here or loadable(i, index) for i, here in enumerate(found)]
        if not all(t or group.kind is not GroupKind.FULL for t, group in zip(there, groups, strict=True)):
            return
        yield there
