"""`BlockPool`: the physical KV blocks, their reference counts, and the order in which free ones are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager


class BlockPool:
    """Reference counts of `num_blocks` blocks, and two lists of free blocks.

    A block is in exactly one state: held (references > 0), cached (free, but its contents can be found and reused), or
    blank (free, without contents). Blank blocks are allocated first, in ascending order at the start, so that a
    request's blocks tend to be adjacent; then cached ones, least recently used first.

    The pool may consist of equal parts, such as the memories of several ranks: part i has the i-th share of the blocks.

    Attributes:
        each: blocks of a part.
        miscounted: a change of references failed halfway (`changing`), so that some blocks may count as held although
            nothing holds them. `recount` repairs that.
    """

    def __init__(self, num_blocks: int, parts: int = 1) -> None:
        self.num_blocks, self.each = num_blocks, max(1, num_blocks // parts)
        self._refs = [0] * num_blocks
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(parts)]
        self._blank: list[list[int]] = [[] for _ in range(parts)]
        self.recount(())

    @property
    def num_free(self) -> int:
        return sum(map(self.free_in, range(len(self._blank))))

    def free_in(self, part: int) -> int:
        """Return the number of free blocks of a part."""
        return len(self._blank[part]) + len(self._cached[part])

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._cached))

    @property
    def cached(self) -> Set[int]:
        return set().union(*self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take_blank(self, part: int = 0) -> int | None:
        """Return a blank block of a part with one reference; None if no block is blank."""
        if not self._blank[part]:
            return None
        block = self._blank[part].pop()
        self._refs[block] = 1
        return block

    def oldest_cached(self, part: int = 0) -> int:
        """Return the cached block of a part to evict next. Raise StopIteration if none is cached."""
        return next(iter(self._cached[part]))

    def hold(self, block: int) -> None:
        """Add a reference to a held or cached block."""
        if self._refs[block] == 0:
            del self._cached[block // self.each][block]
        self._refs[block] += 1

    def drop(self, block: int, *, keep: bool) -> None:
        """Remove a reference; the block becomes cached (`keep`) or blank with the last one."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise AssertionError(f"block {block} was released more often than it was taken")
        self._refs[block] = refs
        if refs == 0:
            if keep:
                self._cached[block // self.each][block] = None
            else:
                self._blank[block // self.each].append(block)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Set `miscounted` if the block of code fails, for callers whose own callers may go on after a failure."""
        try:
            yield
        except BaseException:
            self.miscounted = True
            raise

    def forget(self, block: int) -> None:
        """Discard the contents: a cached block becomes blank, a held one stays held."""
        if self._refs[block] == 0:
            del self._cached[block // self.each][block]
            self._blank[block // self.each].append(block)

    def recount(self, held: Iterable[int]) -> None:
        """Set each block's references to its occurrences in `held`; all other blocks become blank."""
        refs = [0] * self.num_blocks
        for block in held:
            refs[block] += 1
        self._refs = refs
        for part, blank in enumerate(self._blank):
            first = part * self.each
            last = min(first + self.each, self.num_blocks) - 1
            blank[:] = [block for block in range(last, first - 1, -1) if not refs[block]]
            self._cached[part].clear()
        self.miscounted = False

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        blank, cached = set().union(*self._blank), self.cached
        held = {b for b, refs in enumerate(self._refs) if refs > 0}
        if len(blank) != sum(map(len, self._blank)) or blank & cached or blank & held or cached & held:
            raise AssertionError("a block is in two states")
        for part, (own, kept) in enumerate(zip(self._blank, self._cached, strict=True)):
            if any(block // self.each != part for block in (*own, *kept)):
                raise AssertionError("a block is in a part that does not have it")
        if len(blank) + len(cached) + len(held) != self.num_blocks or min(self._refs, default=0) < 0:
            raise AssertionError("a block was lost")
