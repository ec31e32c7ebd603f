"""`KVCache`: the only door to KV blocks. It hands out block numbers; the bytes live on the worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.cache.block_pool import BlockPool
from octavo.cache.prefix_tree import Key, Node, PrefixTree


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks, in order. Only `KVCache` changes it.

    Positions of a sequence, left to right:  [ registered | full or filling | room ]
    registered: full blocks that other requests can find; never written again.
    """

    blocks: list[int] = field(default_factory=list)
    num_registered: int = 0
    """How many leading blocks the prefix tree knows, as these or as blocks of equal content."""
    node: Node | None = None
    """The tree's node for the last registered block."""


@dataclass(slots=True)
class Growth:
    """What the worker must do to a table: (index, block) writes, and (source, destination) copies made in order."""

    writes: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class KVCache:
    """Block pool and prefix tree behind six verbs: match, fork, grow, register, release, reset.

    Blocks are registered when the step that fills them is launched, not when it has run: steps run in order, so whoever
    finds a block there reads it after it was written, even in the same step (each layer writes all KV before attention
    reads any). Requests that arrive together therefore share a prefix while it is still being computed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size)
        self.num_evicted = 0
        self.num_copied = 0

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, namespace: str, keys: Sequence[Key]) -> int:
        """Give an empty table the longest cached prefix of `keys`; returns its length in tokens.

        At least one token is left to compute, since its logits are needed.
        """
        path = self.tree.match(namespace, keys, max_blocks=(len(keys) - 1) // self.block_size)
        for node in path:
            self.pool.hold(node.block)
            table.blocks.append(node.block)
        table.num_registered = len(path)
        table.node = path[-1] if path else None
        return len(path) * self.block_size

    def fork(self, source: BlockTable, table: BlockTable, num_tokens: int) -> None:
        """Let an empty table share the blocks that hold the first `num_tokens` of `source`, the last one in part.

        `grow` copies a shared block when either of the two is about to write into it. What of the shared ones others
        can find is known of both tables.
        """
        for block in source.blocks[: self.blocks_for(num_tokens)]:
            self.pool.hold(block)
            table.blocks.append(block)
        table.num_registered, table.node = source.num_registered, source.node
        while table.node is not None and table.num_registered > num_tokens // self.block_size:
            table.num_registered, table.node = table.num_registered - 1, table.node.parent

    def grow(self, table: BlockTable, start: int, end: int) -> Growth | None:
        """Make positions [start, end) writable: add blocks, and copy those that others can see. None if room lacks."""
        size = self.block_size
        have = len(table.blocks)
        shared = [i for i in range(start // size, min(have, self.blocks_for(end))) if self._is_shared(table.blocks[i])]
        missing = self.blocks_for(end) - have
        if len(shared) + max(missing, 0) > self.pool.num_free:
            return None
        growth = Growth()
        for index in shared:
            old, new = table.blocks[index], self._allocate()
            growth.copies.append((old, new))
            growth.writes.append((index, new))
            table.blocks[index] = new
            self._drop(old)
            if index < table.num_registered:
                table.num_registered, table.node = 0, None
            self.num_copied += 1
        for index in range(have, have + missing):
            block = self._allocate()
            table.blocks.append(block)
            growth.writes.append((index, block))
        return growth

    def register(self, table: BlockTable, namespace: str, keys: Sequence[Key], end: int) -> None:
        """Let others find the full blocks below position `end`; `keys` are known and will be computed up to there."""
        size = self.block_size
        full = end // size
        if full <= table.num_registered:
            return
        node = table.node
        if node is None or node.dead:
            node, table.num_registered = self.tree.root(namespace), 0
        for index in range(table.num_registered, full):
            node = self.tree.insert(node, keys[index * size : (index + 1) * size], table.blocks[index])
        table.num_registered, table.node = full, node

    def release(self, table: BlockTable) -> None:
        """Give all blocks back. Registered ones stay findable until their room is needed, the tail going first."""
        for block in reversed(table.blocks):
            self._drop(block)
        table.blocks, table.num_registered, table.node = [], 0, None

    def num_freed_by(self, tables: Sequence[BlockTable]) -> int:
        """How many blocks would become free if these tables were released: those that nobody else holds."""
        held = Counter(block for table in tables for block in table.blocks)
        return sum(self.pool.refs(block) == count for block, count in held.items())

    def reset(self) -> None:
        """Forget all cached contents, such as after a step failed and some blocks may be wrong."""
        for block in self.tree.clear():
            self.pool.forget(block)

    def recount(self, tables: Sequence[BlockTable]) -> None:
        """Forget all cached contents, and hold what these tables hold and nothing else, whatever was counted before."""
        self.tree.clear()
        self.pool.recount(block for table in tables for block in table.blocks)

    def _is_shared(self, block: int) -> bool:
        return self.pool.refs(block) > 1 or block in self.tree

    def _allocate(self) -> int:
        block = self.pool.take_blank()
        if block is None:
            for gone in self.tree.remove(self.pool.oldest_cached()):
                self.pool.forget(gone)
            self.num_evicted += 1
            block = self.pool.take_blank()
        if block is None:
            raise AssertionError("no block is free although the count said so")
        return block

    def _drop(self, block: int) -> None:
        self.pool.drop(block, keep=block in self.tree)

    def check(self) -> None:
        """Raise AssertionError unless pool and tree agree."""
        self.pool.check()
        findable, cached = self.tree.blocks, self.pool.cached
        for block in findable:
            if self.pool.refs(block) == 0 and block not in cached:
                raise AssertionError(f"block {block} is findable but counted as blank")
        for block in cached - findable:
            raise AssertionError(f"block {block} is kept but can't be found")

    def check_empty(self, num_requests: int) -> None:
        """Raise AssertionError if blocks are held, or `num_requests` are alive, although nothing runs."""
        self.check()
        if num_requests or self.num_free != self.num_blocks:
            raise AssertionError(
                f"{self.pool.num_used} blocks and {num_requests} requests are left although nothing runs"
            )
