"""Why the prefix cache ended where it did, for a request that is being admitted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from octavo.cache.cache import KVCache, within
from octavo.cache.prefix_tree import Key, Node, PrefixTree, digest_after, root_digest
from octavo.features.timeline.story import Miss
from octavo.schedule.request import Request

_NAMESPACES = 32
"""The newest namespaces, in which a prompt that was not found is looked for."""
_CHILDREN = 64
"""The newest continuations that a prompt is compared with."""


class Evictions:
    """The digests of nodes that left the tree, the newest of them, each with the time.

    Two generations: when the younger one is full, the older one is forgotten. Both together have the last `capacity`
    digests at least, and twice as many at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._young: dict[int, float] = {}
        self._old: dict[int, float] = {}
        """Digest -> time; negative if the whole tree was dropped then."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, digest: int, at: float, dropped: bool) -> None:
        young = self._young
        if len(young) >= self._capacity:
            self._old, self._young = young, {}
            young = self._young
        young[digest] = -at if dropped else at

    def get(self, digest: int) -> tuple[float, bool] | None:
        """Return when a node left, and whether the whole tree was dropped; None if it is not known to have left."""
        at = self._young.get(digest) or self._old.get(digest)
        return None if at is None else (abs(at), at < 0)

    def forget(self) -> None:
        self._young, self._old = {}, {}


def explain(cache: KVCache, gone: Evictions, request: Request, now: float) -> list[Miss]:
    """Return the parts of a prompt that a request has to compute, in order, each with the reason.

    Call it between the look-up of its prefix and the registration of its own blocks. `num_computed` tokens were found.
    """
    return list(_parts(_Prompt(cache, request), cache, gone, now))


class _Prompt:
    """The blocks of a prompt that can be shared: all full ones, but for the one with the last token."""

    def __init__(self, cache: KVCache, request: Request) -> None:
        keys = request.keys
        self.keys: Sequence[Key] = keys if isinstance(keys, list) else list(keys)
        self.size = cache.block_size
        self.most = (len(self.keys) - 1) // self.size
        self.found = request.num_computed // self.size
        self.namespace = within(request.table.rank, request.namespace)
        self.node = request.table.node if self.found else cache.tree.find_root(self.namespace)
        self.other_ranks = {within(rank, request.namespace) for rank in range(cache.ranks)} if cache.ranks > 1 else ()

    def chunk(self, index: int) -> tuple[Key, ...]:
        return tuple(self.keys[index * self.size : (index + 1) * self.size])

    def follow(self, node: Node | None, index: int) -> tuple[Node | None, int]:
        """Return the last node along the prompt from `node`, which ends before block `index`, and where that ends."""
        while node is not None and index < self.most and (child := node.children.get(self.chunk(index))) is not None:
            node, index = child, index + 1
        return node, index


def _parts(prompt: _Prompt, cache: KVCache, gone: Evictions, now: float) -> Iterator[Miss]:
    size, total = prompt.size, len(prompt.keys)
    node, begun = prompt.follow(prompt.node, prompt.found)
    if begun > prompt.found:
        yield Miss("state", (begun - prompt.found) * size, prompt.found * size)
    index = begun
    for reason, ago, length in _left(prompt, node, index, gone, now):
        yield Miss(reason, length * size, index * size, ago)
        index += length
    reason, reached = _elsewhere(prompt, cache.tree, index)
    if reached > index:
        yield Miss(reason, (reached - index) * size, index * size)
        index = reached
    rest = total - index * size
    if index == prompt.most:
        yield Miss("last_block", rest, index * size)
    elif index > begun:
        yield Miss("new", rest, index * size)
    else:
        yield _end(prompt, node, index, rest)


def _left(
    prompt: _Prompt, node: Node | None, index: int, gone: Evictions, now: float
) -> list[tuple[str, float | None, int]]:
    """Return the next blocks as far as they once followed `node`: (reason, seconds ago, number of blocks) by runs."""
    digest = root_digest(prompt.namespace) if node is None else node.digest
    runs: list[tuple[str, float | None, int]] = []
    for block in range(index, prompt.most):
        digest = digest_after(digest, prompt.chunk(block))
        found = gone.get(digest)
        if found is None:
            break
        at, dropped = found
        reason = "dropped" if dropped else "evicted"
        if runs and runs[-1][0] == reason:
            runs[-1] = reason, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((reason, now - at, 1))
    return runs


def _elsewhere(prompt: _Prompt, tree: PrefixTree, index: int) -> tuple[str, int]:
    """Return where else the prompt is cached beyond block `index`, and up to which block."""
    if index == prompt.most:
        return "", index
    found, best, first = "", index, prompt.chunk(0)
    for root in itertools.islice(tree.newest_roots, _NAMESPACES):
        if first in root.children and root.namespace != prompt.namespace:
            _, reached = prompt.follow(root, 0)
            if reached > best or (reached == best > index and root.namespace in prompt.other_ranks):
                found, best = root.namespace, reached
    return ("rank" if found in prompt.other_ranks else "namespace"), best


def _end(prompt: _Prompt, node: Node | None, index: int, rest: int) -> Miss:
    """Return why the tree has no continuation of `node` like the prompt's: it has none at all, or others."""
    start = index * prompt.size
    if node is None or not node.children:
        return Miss("new", rest, start)
    chunk, common = prompt.chunk(index), 0
    head = chunk[:1]
    for other in itertools.islice(reversed(node.children), _CHILDREN):
        while other[: common + 1] == head:
            common += 1
            head = chunk[: common + 1]
    return Miss("diverged", rest, start + common) if start + common else Miss("new", rest, 0)
