"""`NoCache`: a `KVCache` for models that keep nothing between steps."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.cache.cache import BlockTable, KVCache
from octavo.cache.prefix_tree import Key


class NoCache(KVCache):
    """Any sequence fits, in no blocks at all, and none of it is found again."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def blocks_for(self, num_tokens: int) -> int:
        return 0

    def match(self, table: BlockTable, namespace: str, keys: Sequence[Key]) -> int:
        return 0

    def register(self, table: BlockTable, namespace: str, keys: Sequence[Key], end: int) -> None:
        """There is nothing to be found."""
