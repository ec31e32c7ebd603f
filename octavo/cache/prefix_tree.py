"""`PrefixTree`: find full blocks by their tokens, so that equal prefixes are stored and computed once.

A radix tree with one block of tokens per edge. A node stands for the tokens from the start of the sequence to its
block's end. Only equal paths share nodes, and tokens are compared, not hashes, so a hit is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

from octavo.core.cache_groups import FULL, NO_BLOCK, CacheGroup, GroupKind

Key = int | bytes
"""Identifies the content of one position: a token id, or a digest of other content."""
Chunk = tuple[Key, ...]


class Node:
    """One full block of tokens after its parent's, with a block per group, or NO_BLOCK where a group has none.

    Roots, and nodes removed from the tree, have no blocks.
    """

    __slots__ = ("_digest", "blocks", "children", "chunk", "dead", "namespace", "parent")

    def __init__(self, parent: Node | None, chunk: Chunk, blocks: list[int], namespace: str) -> None:
        self.parent = parent
        self.chunk = chunk
        self.blocks = blocks
        self.namespace = namespace
        self.children: dict[Chunk, Node] = {}
        self.dead = False
        self._digest: int | None = None

    @property
    def digest(self) -> int:
        """A number for the namespace and all tokens up to here, in this process. It is computed on the first use and
        stays available once the node is removed."""
        if self._digest is not None:
            return self._digest
        path: list[Node] = []
        node: Node | None = self
        while node is not None and node._digest is None:
            path.append(node)
            node = node.parent
        for one in reversed(path):
            above = one.parent
            digest = root_digest(one.namespace) if above is None else hash((above._digest, one.chunk))
            one._digest = digest
        return digest


def root_digest(namespace: str) -> int:
    """Return the digest of a namespace's root."""
    return hash((namespace,))


def digest_after(digest: int, chunk: Chunk) -> int:
    """Return the digest of the node for `chunk` after the node with `digest`."""
    return hash((digest, chunk))


class PrefixTree:
    """Namespaced radix tree over blocks of `block_size` keys.

    Attributes:
        on_removed: called with each node that leaves the tree, and whether all of the tree's contents are dropped.
    """

    def __init__(self, block_size: int, groups: Sequence[CacheGroup] = FULL) -> None:
        self.block_size = block_size
        self._needed = [group.kind is GroupKind.FULL for group in groups]
        """Per group: whether a node without the group's block makes all longer prefixes useless, too."""
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}
        self.on_removed: Callable[[Node, bool], None] | None = None

    def __len__(self) -> int:
        """Return the number of blocks in the tree."""
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    @property
    def blocks(self) -> Set[int]:
        return self._nodes.keys()

    @property
    def newest_roots(self) -> Iterator[Node]:
        """The roots of all namespaces, the newest first."""
        return reversed(self._roots.values())

    def find_root(self, namespace: str) -> Node | None:
        """Return a namespace's root; None if nothing of it is cached."""
        return self._roots.get(namespace)

    def root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, (), [], namespace)
        return root

    def match(self, namespace: str, keys: Sequence[Key], max_blocks: int) -> list[Node]:
        """Return the longest path along `keys`, at most `max_blocks` nodes."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        size = self.block_size
        while node is not None and len(path) < max_blocks:
            start = len(path) * size
            node = node.children.get(tuple(keys[start : start + size]))
            if node is not None:
                path.append(node)
        return path

    def insert(self, parent: Node, keys: Sequence[Key], blocks: Sequence[int]) -> Node:
        """Record that `blocks`, one per group, hold `keys` after `parent`; return their node.

        If an equal node exists, it keeps its blocks and takes the new ones for groups where it has none.
        """
        chunk = tuple(keys)
        node = parent.children.get(chunk)
        if node is None:
            node = Node(parent, chunk, [NO_BLOCK] * len(blocks), parent.namespace)
            parent.children[chunk] = node
        for group, block in enumerate(blocks):
            if block != NO_BLOCK and node.blocks[group] == NO_BLOCK:
                if block in self._nodes:
                    raise AssertionError(f"block {block} is in the tree under other tokens")
                node.blocks[group] = block
                self._nodes[block] = node
        return node

    def remove(self, block: int) -> list[int]:
        """Remove a block, and all that is useless without it; return the removed blocks."""
        node = self._nodes[block]
        group = node.blocks.index(block)
        if self._needed[group]:
            return self._cut(node)
        node.blocks[group] = NO_BLOCK
        del self._nodes[block]
        self._prune(node)
        return [block]

    def clear(self) -> list[int]:
        """Remove everything; return the removed blocks."""
        gone = list(self._nodes)
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            node.dead = True
            stack.extend(node.children.values())
            if self.on_removed is not None and node.parent is not None:
                self.on_removed(node, True)
        self._nodes.clear()
        self._roots.clear()
        return gone

    def _cut(self, node: Node) -> list[int]:
        """Remove a node and all its descendants; return their blocks."""
        parent = node.parent
        if parent is not None:
            del parent.children[node.chunk]
            self._prune(parent)
        gone: list[int] = []
        stack = [node]
        while stack:
            node = stack.pop()
            node.dead = True
            if self.on_removed is not None:
                self.on_removed(node, False)
            for block in node.blocks:
                if block != NO_BLOCK:
                    gone.append(block)
                    del self._nodes[block]
            stack.extend(node.children.values())
            node.children = {}
        return gone

    def _prune(self, node: Node) -> None:
        """Remove nodes, from this one upwards, that have neither blocks nor children."""
        while not node.children and all(block == NO_BLOCK for block in node.blocks):
            node.dead = True
            parent = node.parent
            if parent is None:
                self._roots.pop(node.namespace, None)
                return
            del parent.children[node.chunk]
            if self.on_removed is not None:
                self.on_removed(node, False)
            node = parent
