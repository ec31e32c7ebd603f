"""`PrefixTree`: which full blocks hold which tokens, so that equal prefixes are stored and computed once.

A radix tree with one block an edge. A node stands for the tokens from the start of the sequence to its block's end;
only equal paths share nodes, so a hit is exact: of tokens there are no hashes that could collide.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

Key = int | bytes
"""What identifies the content of one position: a token id, or a digest of something else."""
Chunk = tuple[Key, ...]


class Node:
    """One full block of tokens after its parent's. `block` is -1 on a root and on a node that left the tree."""

    __slots__ = ("block", "children", "chunk", "dead", "namespace", "parent")

    def __init__(self, parent: Node | None, chunk: Chunk, block: int, namespace: str) -> None:
        self.parent = parent
        self.chunk = chunk
        self.block = block
        self.namespace = namespace
        self.children: dict[Chunk, Node] = {}
        self.dead = False


class PrefixTree:
    """Namespaced radix tree over blocks of `block_size` keys."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    @property
    def blocks(self) -> Set[int]:
        return self._nodes.keys()

    def root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, (), -1, namespace)
        return root

    def match(self, namespace: str, keys: Sequence[Key], max_blocks: int) -> list[Node]:
        """The longest known path along `keys`, at most `max_blocks` long."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        size = self.block_size
        while node is not None and len(path) < max_blocks:
            start = len(path) * size
            node = node.children.get(tuple(keys[start : start + size]))
            if node is not None:
                path.append(node)
        return path

    def insert(self, parent: Node, keys: Sequence[Key], block: int) -> Node:
        """Say that `block` holds the block of `keys` after `parent`; an equal node that exists already wins."""
        chunk = tuple(keys)
        node = parent.children.get(chunk)
        if node is None:
            if block in self._nodes:
                raise AssertionError(f"block {block} is in the tree under other tokens")
            node = Node(parent, chunk, block, parent.namespace)
            parent.children[chunk] = node
            self._nodes[block] = node
        return node

    def remove(self, block: int) -> list[int]:
        """Forget a block and everything that can only be reached through it; returns the blocks forgotten."""
        node = self._nodes[block]
        parent = node.parent
        if parent is not None:
            del parent.children[node.chunk]
            self._prune_root(parent)
        gone: list[int] = []
        stack = [node]
        while stack:
            node = stack.pop()
            node.dead = True
            gone.append(node.block)
            del self._nodes[node.block]
            stack.extend(node.children.values())
            node.children = {}
        return gone

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks forgotten."""
        gone = list(self._nodes)
        for node in self._nodes.values():
            node.dead = True
        for root in self._roots.values():
            root.dead = True
        self._nodes.clear()
        self._roots.clear()
        return gone

    def _prune_root(self, node: Node) -> None:
        if node.parent is None and not node.children:
            node.dead = True
            self._roots.pop(node.namespace, None)
