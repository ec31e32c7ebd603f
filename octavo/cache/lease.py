"""`Lease`: KV blocks that stay held after the request that computed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.core.cache_groups import NO_BLOCK


@dataclass(slots=True, eq=False)
class Lease:
    """References to the blocks of one sequence. Made by `KVCache.lease`, which also lists all leases.

    Leased blocks are neither evicted nor written, so prefixes in them can still be found. They are missing to requests
    until `release` is called.

    Attributes:
        owner: who releases it, for error texts.
        groups: the blocks in order for each group of layers; NO_BLOCK where the group keeps none. Nothing for a STATE
            that stands beyond `num_tokens`, after a step whose token was not needed any more.
        num_tokens: positions from the sequence's start that the blocks hold.
    """

    owner: str
    groups: tuple[tuple[int, ...], ...]
    num_tokens: int
    _give_back: Callable[[Lease], None]

    @property
    def held(self) -> Iterator[int]:
        """Every block that the lease has a reference to."""
        return (block for group in self.groups for block in group if block != NO_BLOCK)

    def release(self) -> None:
        """Give the blocks back. A second call does nothing, so a call that failed can be repeated."""
        self._give_back(self)
