"""`BlockTable`: the KV blocks of one sequence; `Growth`: how a step changes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.cache.prefix_tree import Node
from octavo.core.cache_groups import NO_BLOCK


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks, in order, for each group of layers. Only `KVCache` changes it.

    Positions of a sequence, left to right:  [ registered | full or filling | unused ]
    registered: full blocks that other requests can find; never written again.

    A WINDOW group has NO_BLOCK in front, for positions that have left the window; a STATE group has one entry.
    """

    groups: list[list[int]] = field(default_factory=list)
    num_registered: int = 0
    """Number of leading blocks in the prefix tree, as these blocks or as blocks of equal content."""
    node: Node | None = None
    """The tree's node for the last registered block."""
    rank: int = -1
    """The rank whose memory has all blocks; -1 if each rank has its share of every block, and for an empty table."""

    @property
    def blocks(self) -> list[int]:
        """The blocks of the first group, which are all blocks if the model has one group."""
        return self.groups[0] if self.groups else []

    @property
    def held(self) -> Iterator[int]:
        """Every block that the table holds a reference to."""
        return (block for group in self.groups for block in group if block != NO_BLOCK)


@dataclass(slots=True)
class Growth:
    """Changes that a step makes to a table.

    Attributes:
        writes: (group, index, block) entries that the worker must change.
        copies: (source, destination) blocks to copy first, in order.
    """

    writes: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
