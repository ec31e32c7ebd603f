"""`BlockPool`: the physical KV blocks, their reference counts, and the order in which free ones are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set


class BlockPool:
    """Reference counts of `num_blocks` blocks, and two lists of free blocks.

    A block is in exactly one state: held (references > 0), cached (free, but its contents can be found and reused), or
    blank (free, without contents). Blank blocks are allocated first, in ascending order at the start, so that a
    request's blocks tend to be adjacent; then cached ones, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def cached(self) -> Set[int]:
        return self._cached.keys()

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take_blank(self) -> int | None:
        """Return a blank block with one reference; None if no block is blank."""
        if not self._blank:
            return None
        block = self._blank.pop()
        self._refs[block] = 1
        return block

    def oldest_cached(self) -> int:
        """Return the cached block to evict next. Raise StopIteration if none is cached."""
        return next(iter(self._cached))

    def hold(self, block: int) -> None:
        """Add a reference to a held or cached block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def drop(self, block: int, *, keep: bool) -> None:
        """Remove a reference; the block becomes cached (`keep`) or blank with the last one."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise AssertionError(f"block {block} was released more often than it was taken")
        self._refs[block] = refs
        if refs == 0:
            if keep:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def forget(self, block: int) -> None:
        """Discard the contents: a cached block becomes blank, a held one stays held."""
        if self._refs[block] == 0:
            del self._cached[block]
            self._blank.append(block)

    def recount(self, held: Iterable[int]) -> None:
        """Set each block's references to its occurrences in `held`; all other blocks become blank."""
        refs = [0] * self.num_blocks
        for block in held:
            refs[block] += 1
        self._refs = refs
        self._blank = [block for block in range(self.num_blocks - 1, -1, -1) if not refs[block]]
        self._cached = OrderedDict()

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        blank, cached = set(self._blank), set(self._cached)
        held = {b for b, refs in enumerate(self._refs) if refs > 0}
        if len(blank) != len(self._blank) or blank & cached or blank & held or cached & held:
            raise AssertionError("a block is in two states")
        if len(blank) + len(cached) + len(held) != self.num_blocks or min(self._refs, default=0) < 0:
            raise AssertionError("a block was lost")
