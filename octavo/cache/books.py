"""`check_books`: whether what is known of each block agrees."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.cache.block_pool import BlockPool
from octavo.cache.lease import Lease
from octavo.cache.prefix_tree import PrefixTree


def check_books(pool: BlockPool, tree: PrefixTree, leases: Iterable[Lease]) -> None:
    """Raise AssertionError unless pool, tree and leases agree."""
    pool.check()
    findable, cached = tree.blocks, pool.cached
    for block in findable:
        if pool.refs(block) == 0 and block not in cached:
            raise AssertionError(f"block {block} is in the prefix tree but blank")
    for block in cached - findable:
        raise AssertionError(f"block {block} is cached but not in the prefix tree")
    for lease in leases:
        if any(pool.refs(block) == 0 for block in lease.held):
            raise AssertionError(f"a block leased by {lease.owner} counts as free")
